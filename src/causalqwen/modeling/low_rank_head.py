"""A causal size C below H: what C coordinates inherit from an lm_head that reads H (architecture 2.3.4)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from causalqwen.distributions import upcast


@dataclass
class NarrowHead:
    """loc_U = W_loc z + b_loc [C] and W_cls loc_U + b_cls [V], such that the scores are nearly W z + b; float32."""

    loc_weight: Tensor
    loc_bias: Tensor
    weight: Tensor
    bias: Tensor

    def copy_to(self, loc_net: nn.Linear, lm_head: nn.Linear) -> None:
        """Write them into the two layers, each in its own dtype."""
        loc_net.load_state_dict({"weight": self.loc_weight, "bias": self.loc_bias})
        lm_head.load_state_dict({"weight": self.weight, "bias": self.bias})


@torch.no_grad()
def narrow_head(head: nn.Linear, features: Tensor, size: int) -> NarrowHead:
    """The map of C numbers whose scores differ least from W z + b on `features`, in the mean square.

    A token counts by its mean probability, and what all scores share, which no choice depends on, does not count: that is
    KL(softmax || narrow softmax) to second order, at the mean softmax. With mu and Sigma of the features, L = Sigma^(1/2), and
    V the C leading eigenvectors of L G L, G the covariance of W's rows under the mean softmax:
    loc_U = V^T L^-1 (z - mu), whose coordinates have variance 1, W_cls = W L V, and b_cls = b + W mu.

    head: W [V, H] and b. features: z [N, H]; Sigma is shrunk towards its diagonal by H / (H + N). ValueError for a size that
    is not within 1 to H.
    """
    hidden = head.weight.shape[1]
    if not 1 <= size <= hidden:
        raise ValueError(f"causal_size {size} does not lie in 1 to {hidden}, the hidden size")
    z = features.double()
    mean = z.mean(0)
    covariance = (z - mean).T @ (z - mean) / len(z)
    share = hidden / (hidden + len(z))
    covariance = (1 - share) * covariance + share * covariance.diagonal().clamp(min=1e-6).diag()
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=values.amax() * 1e-12).sqrt()
    root, inverse = (vectors * values) @ vectors.T, (vectors / values) @ vectors.T

    weight = upcast(head.weight)
    mass = torch.stack([upcast(head(part)).softmax(-1).sum(0) for part in features.to(head.weight.dtype).split(128)])
    mass = mass.sum(0) / len(features)
    centre = mass @ weight
    spread = torch.zeros(hidden, hidden, dtype=torch.float64, device=weight.device)
    for rows, shares in zip(weight.split(8192), mass.split(8192), strict=True):
        centred = (rows - centre).double()
        spread += centred.T @ (centred * shares.unsqueeze(1))
    leading = torch.linalg.eigh(root @ spread @ root)[1].flip(1)[:, :size]
    loc_weight = leading.T @ inverse
    bias = weight @ mean.float()
    return NarrowHead(
        loc_weight.float(),
        -(loc_weight @ mean).float(),
        weight @ (root @ leading).float(),
        bias if head.bias is None else bias + upcast(head.bias),
    )
