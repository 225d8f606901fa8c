"""Lists of dicts as batches, masks, graphs, sparse embeddings, distances."""

from __future__ import annotations

import math

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from projects.learner import Learner
from projects.registry import Setup, project


class Boxes(Dataset):
    """Images of different sizes as lists of patches, with zero to three boxes each."""

    def __len__(self):
        return 24

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n, k = int(torch.randint(6, 20, (), generator=g)), i % 4
        image = torch.randn(n, 12, generator=g)
        boxes = torch.rand(k, 4, generator=g)
        boxes[:, 2:] = boxes[:, :2] + 0.1 + boxes[:, 2:]
        return image, {"boxes": boxes, "labels": torch.randint(1, 4, (k,), generator=g), "image_id": torch.tensor([i])}


def detection_collate(batch):
    return tuple(zip(*batch, strict=True))


class TinyDetector(nn.Module):
    """In training it returns a dict of losses, as torchvision's do; in evaluation a list of dicts."""

    def __init__(self, dim=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, dim), nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, dim))
        self.cls, self.box = nn.Linear(dim, 4), nn.Linear(dim, 4)

    def forward(self, images, targets=None):
        losses = {"loss_classifier": 0.0, "loss_box_reg": 0.0}
        detections = []
        for i, image in enumerate(images):
            h = self.backbone(image)
            logits, boxes = self.cls(h), self.box(h).sigmoid()
            if targets is None:
                detections.append({"boxes": boxes, "scores": logits.softmax(-1)[:, 1:].max(-1).values})
                continue
            t = targets[i]
            labels = torch.zeros(len(h), dtype=torch.long, device=h.device)
            matched = torch.arange(len(t["labels"]), device=h.device)
            labels[matched] = t["labels"]
            losses["loss_classifier"] = losses["loss_classifier"] + F.cross_entropy(logits, labels)
            losses["loss_box_reg"] = losses["loss_box_reg"] + F.smooth_l1_loss(
                boxes[matched], t["boxes"], reduction="sum"
            ) / max(1, len(matched))
        return losses if targets is not None else detections


class LitDetector(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model = TinyDetector()

    def training_step(self, batch, batch_idx):
        images, targets = batch
        optimizer = self.optimizers()
        loss_dict = self.model(list(images), [dict(t) for t in targets])
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        self.manual_backward(losses)
        optimizer.step()
        schedule = self.lr_schedulers()
        schedule.step()
        self.log_dict(loss_dict, batch_size=len(images))

    def validation_step(self, batch, batch_idx):
        images, _ = batch
        detections = self.model(list(images))
        self.log("mean_score", torch.cat([d["scores"] for d in detections]).mean(), batch_size=len(images))

    def configure_optimizers(self):
        params = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0 / 10, total_iters=5)]


@project("vision")
def detection_lists_of_dicts() -> Setup:
    """Detection: images of all sizes, lists of dicts, some without boxes, in manual optimization."""
    data = DataLoader(Boxes(), batch_size=4, collate_fn=detection_collate)
    return Setup(LitDetector(), data, data)


class DiceLoss(nn.Module):
    def forward(self, logits, targets, smooth=1.0):
        inputs = torch.sigmoid(logits).reshape(-1)
        targets = targets.reshape(-1)
        intersection = (inputs * targets).sum()
        return 1 - (2.0 * intersection + smooth) / (inputs.sum() + targets.sum() + smooth)


class LitSegmentation(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 1, 1)
        self.dice = DiceLoss()

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([self.up(self.mid(skip)), skip], dim=1))

    def training_step(self, batch, batch_idx):
        x, mask = batch
        logits = self(x)
        dice, bce = self.dice(logits, mask), F.binary_cross_entropy_with_logits(logits, mask)
        self.log_dict({"dice": dice, "bce": bce})
        return dice + bce

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "dice"}}


@project("vision", precisions=("bf16",))
def segmentation_dice_plateau() -> Setup:
    """A small U-net with dice loss and ReduceLROnPlateau."""
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return Setup(
        LitSegmentation(), DataLoader(TensorDataset(x, (x > 0.5).float()), batch_size=2), trainer={"max_epochs": 2}
    )


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


class LitGCNFp32Sparse(LitGCN):
    """`torch.sparse.mm` knows no half precision: the way round it that people write."""

    def training_step(self, idx, batch_idx):
        h = self.x
        for i, layer in enumerate((self.gc1, self.gc2)):
            support = torch.mm(h, layer.weight)
            with torch.autocast(self.device.type, enabled=False):
                h = torch.sparse.mm(self.adj, support.float()) + layer.bias
            h = F.relu(h) if i == 0 else h
        return F.cross_entropy(h[idx], self.y[idx])


@project("graph")
def gcn_sparse_mm_autocast_off() -> Setup:
    """Kipf's GCN with autocast turned off around `torch.sparse.mm`."""
    return Setup(LitGCNFp32Sparse(), DataLoader(range(40), batch_size=10))


class MessagePassing(Learner):
    """Scatter by `index_add` and attention by `scatter_reduce`, by hand."""

    lr = 5e-3

    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
        self.score, self.update, self.head = nn.Linear(32, 1), nn.GRUCell(16, 16), nn.Linear(16, 4)
        for name, value in zip(("x", "edges", "y"), ring_graph(), strict=True):
            self.register_buffer(name, value)

    def forward(self):
        h, (src, dst) = self.x, self.edges
        for _ in range(3):
            pair = torch.cat([h[src], h[dst]], dim=-1)
            score = F.leaky_relu(self.score(pair).squeeze(-1), 0.2).float()
            top = torch.full((len(h),), -torch.inf, device=h.device).scatter_reduce(0, dst, score, "amax")
            weight = (score - top[dst]).exp()
            weight = weight / torch.zeros(len(h), device=h.device).index_add(0, dst, weight)[dst]
            m = self.message(pair)
            out = torch.zeros(len(h), m.size(1), device=h.device, dtype=m.dtype)
            h = self.update(out.index_add(0, dst, m * weight.unsqueeze(-1).to(m.dtype)), h)
        return self.head(h)

    def training_step(self, idx, batch_idx):
        return F.cross_entropy(self()[idx], self.y[idx])


@project("graph")
def message_passing_index_add() -> Setup:
    """Attention and messages by `index_add` and `scatter_reduce`, a GRU cell as update."""
    return Setup(MessagePassing(), DataLoader(range(40), batch_size=10))


@project("graph", needs=("torch_geometric",))
def torch_geometric_gat_batches() -> Setup:
    """PyTorch Geometric: GCNConv and GATConv on batches of graphs."""
    import torch_geometric  # pyright: ignore[reportMissingImports]
    from torch_geometric.data import Data  # pyright: ignore[reportMissingImports]
    from torch_geometric.nn import GATConv, GCNConv, global_mean_pool  # pyright: ignore[reportMissingImports]

    class LitGNN(Learner):
        lr = 5e-3

        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.lin = GCNConv(8, 16), GATConv(16, 8, heads=2), nn.Linear(16, 2)

        def training_step(self, data, batch_idx):
            x = self.conv1(data.x, data.edge_index).relu()
            x = self.conv2(x, data.edge_index).relu()
            loss = F.cross_entropy(self.lin(global_mean_pool(x, data.batch)), data.y)
            self.log("loss", loss, batch_size=data.num_graphs)
            return loss

    graphs = []
    for i in range(32):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(4, 10, (), generator=g))
        edges = torch.randint(0, n, (2, 3 * n), generator=g)
        graphs.append(Data(x=torch.randn(n, 8, generator=g) + i % 2, edge_index=edges, y=torch.tensor([i % 2])))
    return Setup(LitGNN(), torch_geometric.loader.DataLoader(graphs, batch_size=8))


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


def clusters(n=64, dim=16, classes=8):
    g = torch.Generator().manual_seed(0)
    y = torch.arange(n) % classes
    return TensorDataset(torch.randn(classes, dim, generator=g)[y] + 0.5 * torch.randn(n, dim, generator=g), y)


class Embedder(Learner):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 16))


class BatchHardTriplet(Embedder):
    def training_step(self, batch, batch_idx):
        x, y = batch
        z = F.normalize(self.net(x), dim=1)
        dist = torch.cdist(z, z)
        same = y[:, None] == y[None]
        positive = dist.masked_fill(~same, 0).max(1).values
        negative = dist.masked_fill(same, float("inf")).min(1).values
        return F.relu(positive - negative + 0.3).mean()


class ArcFace(Embedder):
    def __init__(self, s=64.0, m=0.5, classes=8):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(classes, 16)))
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)
        self.th, self.mm = math.cos(math.pi - m), math.sin(math.pi - m) * m

    def training_step(self, batch, batch_idx):
        x, y = batch
        cosine = F.linear(F.normalize(self.net(x)), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - torch.pow(cosine, 2)).clamp(1e-6, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > self.th, phi, cosine - self.mm)
        one_hot = torch.zeros(cosine.size(), device=x.device).scatter_(1, y.view(-1, 1).long(), 1)
        output = self.s * (one_hot * phi + (1.0 - one_hot) * cosine)
        return F.cross_entropy(output, y)


class MemoryBank(Embedder):
    """Instance discrimination with a bank of every sample's feature (Wu et al.)."""

    def __init__(self, n=64):
        super().__init__()
        self.register_buffer("bank", F.normalize(torch.randn(n, 16), dim=1))

    def training_step(self, batch, batch_idx):
        x, index = batch
        z = F.normalize(self.net(x), dim=1)
        logits = z @ self.bank.clone().t() / 0.07
        loss = F.cross_entropy(logits, index)
        with torch.no_grad():
            self.bank[index] = F.normalize(self.bank[index] * 0.5 + z * 0.5, dim=1)
        return loss


@project("metric learning")
def triplet_batch_hard() -> Setup:
    """Batch-hard triplets by `torch.cdist`."""
    return Setup(BatchHardTriplet(), DataLoader(clusters(), batch_size=16), trainer={"max_epochs": 2})


@project("metric learning")
def arcface() -> Setup:
    """ArcFace with scale 64."""
    return Setup(ArcFace(), DataLoader(clusters(), batch_size=16), trainer={"max_epochs": 2, "gradient_clip_val": 5.0})


@project("metric learning")
def memory_bank() -> Setup:
    """A memory bank that the step writes by index."""
    x = clusters().tensors[0]
    return Setup(MemoryBank(), DataLoader(TensorDataset(x, torch.arange(64)), batch_size=16), trainer={"max_epochs": 2})


@project("metric learning", needs=("pytorch_metric_learning",))
def pytorch_metric_learning_losses() -> Setup:
    """pytorch-metric-learning: cross-batch memory, miner, sub-centre ArcFace."""
    from pytorch_metric_learning import losses, miners  # pyright: ignore[reportMissingImports]

    class LitPML(Embedder):
        def __init__(self):
            super().__init__()
            self.miner = miners.MultiSimilarityMiner()
            self.loss_fn = losses.CrossBatchMemory(
                losses.NTXentLoss(temperature=0.1), 16, memory_size=32, miner=self.miner
            )
            self.proxy = losses.SubCenterArcFaceLoss(num_classes=8, embedding_size=16)

        def training_step(self, batch, batch_idx):
            x, y = batch
            z = self.net(x)
            return self.loss_fn(z, y) + 0.1 * self.proxy(z, y)

    return Setup(LitPML(), DataLoader(clusters(), batch_size=16), trainer={"max_epochs": 2})
