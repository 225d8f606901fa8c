"""Lists of dicts as batches, masks, graphs, sparse embeddings, distances."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from projects.registry import Setup, project


def ring_graph(n=40):
    g = torch.Generator().manual_seed(0)
    src = torch.arange(n).repeat(3)
    dst = torch.cat([(torch.arange(n) + 1) % n, (torch.arange(n) - 1) % n, torch.randint(0, n, (n,), generator=g)])
    x = torch.randn(n, 16, generator=g)
    return x, torch.stack([torch.cat([src, dst]), torch.cat([dst, src])]), (torch.arange(n) // 10) % 4


class GraphConvolution(nn.Module):
    """Kipf's pygcn: `torch.spmm(adj, x @ weight)`."""

    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(i, o).uniform_(-1 / math.sqrt(o), 1 / math.sqrt(o)))
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x, adj):
        support = torch.mm(x, self.weight)
        return torch.sparse.mm(adj, support) + self.bias


class LitGCN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConvolution(16, 16), GraphConvolution(16, 4)
        x, edges, y = ring_graph()
        n = len(x)
        loops = torch.arange(n).repeat(2, 1)
        edges = torch.cat([edges, loops], 1)
        degree = torch.bincount(edges[0], minlength=n).float()
        values = degree[edges[0]].rsqrt() * degree[edges[1]].rsqrt()
        self.register_buffer("adj", torch.sparse_coo_tensor(edges, values, (n, n)).coalesce(), persistent=False)
        self.register_buffer("x", x)
        self.register_buffer("y", y)

    def training_step(self, idx, batch_idx):
        h = F.relu(self.gc1(self.x, self.adj))
        logits = F.log_softmax(self.gc2(h, self.adj), dim=1)
        return F.nll_loss(logits[idx], self.y[idx])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, weight_decay=5e-4)


@project("graph")
def gcn_sparse_mm() -> Setup:
    """Kipf's GCN: `torch.sparse.mm` under autocast."""
    return Setup(LitGCN(), DataLoader(range(40), batch_size=10))


class Recommender(L.LightningModule):
    """Sparse embeddings with SparseAdam beside a dense tower with AdamW, by hand."""

    def __init__(self, users=50, items=80, dim=16):
        super().__init__()
        self.automatic_optimization = False
        self.users, self.items = (
            nn.Embedding(users, dim, sparse=True),
            nn.EmbeddingBag(items, dim, sparse=True, mode="mean"),
        )
        self.tower = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        user, history, click = batch
        logits = self.tower(torch.cat([self.users(user), self.items(history)], dim=1)).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, click)
        for opt in self.optimizers():
            opt.zero_grad()
        self.manual_backward(loss)
        for opt in self.optimizers():
            opt.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        sparse = torch.optim.SparseAdam([*self.users.parameters(), *self.items.parameters()], lr=1e-2)
        return sparse, torch.optim.AdamW(self.tower.parameters(), lr=1e-2)


@project("graph")
def sparse_embeddings_sparse_adam() -> Setup:
    """Sparse embeddings trained by SparseAdam, all other weights by AdamW."""
    g = torch.Generator().manual_seed(0)
    user, history = torch.randint(0, 50, (64,), generator=g), torch.randint(0, 80, (64, 5), generator=g)
    return Setup(Recommender(), DataLoader(TensorDataset(user, history, (user % 2).float()), batch_size=8))
