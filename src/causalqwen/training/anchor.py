"""What keeps a backbone's language while adapters in it learn numbers: its own distributions on plain text."""

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from causalqwen.distributions import upcast
from causalqwen.modeling import CausalQwenForCausalLM
from causalqwen.modeling.chain import Chain
from causalqwen.training import ranks

_OUT = -1e30  # a score without probability whose differences stay finite


@torch.no_grad()
def text_chunks(model: CausalQwenForCausalLM, text: str, chunk: int = 512) -> list[Tensor]:
    """The text as the backbone itself reads it (numbers are digits), int64 [<= chunk] each."""
    tokenizer = model.processor.tokenizer
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)
    limit = model.config.context_length or chunk
    chunks = [part for part in ids.split(min(chunk, limit)) if len(part) > 1]
    if not chunks:
        raise ValueError("the text has no two tokens: nothing to learn from")
    return chunks


class TextAnchor:
    """KL(backbone || model), softmax over loc_S, on chunks of plain text (soft targets: Hinton et al. 2015).

    What the backbone says is kept as features, H numbers per token instead of V. Make it before anything is trained.

    Args:
        tokens: length of a chunk; a shorter end of the text is left out unless it is all there is.
        count: how many chunks to keep at most, spread over the text.
    """

    @torch.no_grad()
    def __init__(self, model: CausalQwenForCausalLM, text: str, tokens: int = 128, count: int = 256) -> None:
        chunks = text_chunks(model, text, tokens)
        chunks = [part for part in chunks if len(part) == len(chunks[0])]
        chunks = chunks[:: -(-len(chunks) // count)]
        self.ids = torch.stack(chunks).to(model.device)
        was_training = model.training
        model.eval()
        passes = tqdm(self.ids.split(8), desc="reading the anchor text", leave=False, disable=ranks.rank() > 0)
        self.features = torch.cat([model.features(ids).last_hidden_state[:, :-1] for ids in passes])
        model.train(was_training)
        self.used = model.action.rest_mask

    def __len__(self) -> int:
        return len(self.ids)

    def loss(self, model: CausalQwenForCausalLM, index: int) -> Tensor:
        """Mean nats per token of chunk `index`, with a gradient to whatever of `model` requires one."""
        backbone_head = model.backbone.get_output_embeddings()
        with torch.no_grad():
            wanted = upcast(backbone_head(self.features[index])).masked_fill(~self.used, _OUT).log_softmax(-1)
        chain = Chain(model, model.features(self.ids[index : index + 1]).last_hidden_state[0, :-1])
        scores = upcast(chain.words(chain.loc_U)).masked_fill(~self.used, _OUT)
        return F.kl_div(scores.log_softmax(-1), wanted, reduction="batchmean", log_target=True)
