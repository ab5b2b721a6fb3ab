"""The residual of which deep abduction, a domain and the value branch are made."""

from torch import Tensor, nn
from torch.nn import functional as F


class ResidualPerceptron(nn.Module):
    """Hidden layers with GELU and dropout, then a linear one that starts at zero: the residual starts as nothing."""

    def __init__(
        self, input_size: int, hidden_size: int, output_size: int, *, layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        sizes = [input_size] + [hidden_size] * layers
        self.hidden = nn.ModuleList(nn.Linear(size, hidden_size) for size in sizes[:-1])
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(sizes[-1], output_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ordinary hidden layers, a last one of zeros."""
        for layer in self.hidden:
            nn.init.kaiming_uniform_(layer.get_parameter("weight"), a=5**0.5)
            nn.init.zeros_(layer.get_parameter("bias"))
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def inner(self, features: Tensor) -> Tensor:
        """What the last layer reads."""
        features = features.to(self.last.weight.dtype)
        for layer in self.hidden:
            features = self.dropout(F.gelu(layer(features)))
        return features

    def forward(self, features: Tensor) -> Tensor:
        made: Tensor = self.last(self.inner(features))
        return made
