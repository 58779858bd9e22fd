"""BERTScore recall: how much of a reference text a candidate text says, by matching their tokens' embeddings.

Source: Zhang et al. 2020 (arXiv 1904.09675), recall without idf weights; equal to the package bert-score.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ddpo_pytorch.scorers.devices import own_device, own_dtype
from ddpo_pytorch.scorers.hub import commit_of, first_line


class BertScoreRecall(torch.nn.Module):
    """A text encoder that compares sentences token by token."""

    def __init__(
        self,
        model: str,
        num_layers: int,
        revision: str = "",
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """
        Args:
            model: hub id or folder.
            num_layers: the hidden state to compare, counted from the embeddings (0).

        Raises:
            ValueError: no such model, or it has fewer layers.
        """
        super().__init__()
        from transformers import AutoModel, AutoTokenizer

        self.device = own_device(device)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model, revision=commit_of(model, revision))
            encoder = AutoModel.from_pretrained(model, revision=commit_of(model, revision))
        except Exception as error:
            raise ValueError(f'cannot load the text encoder "{model}": {first_line(error)}') from error
        available = encoder.config.num_hidden_layers
        if not 0 <= num_layers <= available:
            raise ValueError(f'num_layers must be from 0 to {available} for "{model}"; got {num_layers}')
        self.encoder = encoder.to(self.device, own_dtype(dtype)).eval().requires_grad_(False)
        self.num_layers = num_layers
        # Some tokenizers, deberta-xlarge-mnli's among them, declare no length.
        self.max_length = min(self.tokenizer.model_max_length, getattr(encoder.config, "max_position_embeddings", 512))

    def _embed(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Unit-length token embeddings (B, L, D), whether each is a token (B, L), and whether it is of the text."""
        batch = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_special_tokens_mask=True,
            return_tensors="pt",
        ).to(self.device)
        is_special = batch.pop("special_tokens_mask").bool()
        hidden = self.encoder(**batch, output_hidden_states=True).hidden_states[self.num_layers]
        is_token = batch["attention_mask"].bool()
        return F.normalize(hidden.float(), dim=-1), is_token, is_token & ~is_special

    @torch.no_grad()
    def forward(self, candidates: Sequence[str], references: Sequence[str]) -> np.ndarray:
        """Recall of each reference by its candidate: float64 (B,), at most 1; 0 for an empty candidate.

        A reference's own tokens are averaged over, each with its best match among all of the candidate's, the two
        special ones included.
        """
        reference, _, counts = self._embed([text.strip() for text in references])
        candidate, matchable, _ = self._embed([text.strip() for text in candidates])
        similarity = reference @ candidate.transpose(1, 2)
        best = similarity.masked_fill(~matchable[:, None], -torch.inf).amax(-1)
        recall = (best * counts).sum(-1) / counts.sum(-1)
        empty = torch.tensor([not text.strip() for text in candidates], device=self.device)
        return recall.masked_fill(empty, 0).double().cpu().numpy()
