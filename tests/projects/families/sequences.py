"""Cells in a loop, packed sequences, weights that are used many times in one step."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

from projects.registry import Setup, project


def collate_sentences(samples):
    tokens, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(t) for t in tokens])
    return pad_sequence(tokens, batch_first=True), lengths, torch.tensor(labels)


def sentences(n=48, vocab=50, labels=3):
    g = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 20, (n,), generator=g).tolist()
    tokens = [torch.randint(1, vocab, (k,), generator=g) for k in lengths]
    return [(t, int(t.sum()) % labels) for t in tokens]


class LitTextRNN(L.LightningModule):
    def __init__(self, rnn_type="LSTM", bidirectional=True):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.rnn = getattr(nn, rnn_type)(16, 24, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.classifier = nn.Linear(24 * (1 + bidirectional), 3)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        output, _ = self.rnn(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        mask = (torch.arange(output.size(1), device=self.device)[None] < lengths[:, None]).unsqueeze(-1)
        pooled = output.masked_fill(~mask, float("-inf")).max(dim=1).values
        return self.classifier(pooled)

    def training_step(self, batch, batch_idx):
        tokens, lengths, labels = batch
        loss = F.cross_entropy(self(tokens, lengths), labels)
        self.log("train/loss", loss, batch_size=len(labels))
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, lengths, labels = batch
        logits = self(tokens, lengths)
        self.log("val/loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        self.log("val/acc", (logits.argmax(-1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 3e-3, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@project("recurrent", quick=True)
def packed_bidirectional_lstm() -> Setup:
    """Packed sequences, two layers, both directions, masked max pooling."""
    return Setup(LitTextRNN(), DataLoader(sentences(), batch_size=8, collate_fn=collate_sentences))
