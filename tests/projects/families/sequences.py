"""Cells in a loop, packed sequences, weights that are used many times in one step."""

from __future__ import annotations

import itertools
import random

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from projects.learner import Learner
from projects.registry import Setup, project


class AddingProblem(Dataset):
    """Two marked numbers among many: their sum is the target."""

    def __init__(self, n=32, length=128):
        g = torch.Generator().manual_seed(1)
        values = torch.rand(n, length, generator=g)
        marks = torch.zeros(n, length)
        for i in range(n):
            marks[i, torch.randperm(length, generator=g)[:2]] = 1
        self.x = torch.stack([values, marks], dim=-1)
        self.y = (values * marks).sum(1)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class LitCell(L.LightningModule):
    def __init__(self, cell="gru", hidden_size=64, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[cell](2, hidden_size)
        self.out = nn.Linear(hidden_size, 1)

    def forward(self, x):
        h = x.new_zeros(x.size(0), self.hparams.hidden_size)
        c = torch.zeros_like(h)
        for t in range(x.size(1)):
            if self.hparams.cell == "lstm":
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
        return self.out(h).squeeze(-1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


@project("recurrent")
def lstm_cell_128_steps() -> Setup:
    """An LSTM cell over 128 steps, with gradient clipping."""
    return Setup(LitCell("lstm"), DataLoader(AddingProblem(), batch_size=8), trainer={"gradient_clip_val": 1.0})


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


@project("recurrent")
def packed_gru() -> Setup:
    """Packed sequences through `nn.GRU`."""
    data = DataLoader(sentences(), batch_size=8, collate_fn=collate_sentences)
    return Setup(LitTextRNN("GRU", bidirectional=False), data)


SOS, EOS, PAD = 1, 2, 0


class Attention(nn.Module):
    """Bahdanau's."""

    def __init__(self, hidden):
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, query, keys, mask):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        scores = scores.masked_fill(~mask.unsqueeze(1), -1e4)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class Seq2Seq(Learner):
    def __init__(self, vocab=24, hidden=32, teacher_forcing_ratio=0.5):
        super().__init__()
        self.teacher_forcing_ratio = teacher_forcing_ratio
        self.embedding = nn.Embedding(vocab, hidden, padding_idx=PAD)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.attention = Attention(hidden)
        self.decoder = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, source, target=None, teacher_forcing=True):
        mask = source != PAD
        encoded, hidden = self.encoder(self.embedding(source))
        token = source.new_full((len(source), 1), SOS)
        logits = []
        for t in range(target.size(1)):
            query = hidden.permute(1, 0, 2)
            context, _ = self.attention(query, encoded, mask)
            output, hidden = self.decoder(torch.cat((self.embedding(token), context), dim=2), hidden)
            logits.append(self.out(output))
            token = target[:, t : t + 1] if teacher_forcing else logits[-1].argmax(-1).detach()
        return torch.cat(logits, dim=1)

    def training_step(self, batch, batch_idx):
        source, target = batch
        logits = self(source, target, random.Random(batch_idx).random() < self.teacher_forcing_ratio)
        loss = F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), target.flatten(), ignore_index=PAD)
        self.log("loss", loss)
        return loss


@project("recurrent")
def seq2seq_attention_teacher_forcing() -> Setup:
    """Encoder and decoder with Bahdanau attention, teacher forcing half of the time."""
    source = torch.randint(3, 24, (32, 10), generator=torch.Generator().manual_seed(0))
    source[::3, 7:] = PAD
    data = DataLoader(TensorDataset(source, source.flip(1)), batch_size=8)
    return Setup(Seq2Seq(), data, trainer={"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"})


class UniversalTransformer(L.LightningModule):
    """One encoder layer, used `depth` times, with ALBERT's factorised embeddings and a tied head."""

    def __init__(self, vocab=40, dim=32, depth=12):
        super().__init__()
        self.depth = depth
        self.tokens = nn.Embedding(vocab, 16)
        self.up = nn.Linear(16, dim)
        self.position = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.step_embedding = nn.Embedding(depth, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(dim)
        self.down = nn.Linear(dim, 16)
        self.head = nn.Linear(16, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        h = self.up(self.tokens(x)) + self.position[: x.size(1)]
        for i in range(self.depth):
            h = self.layer(h + self.step_embedding.weight[i], src_mask=mask, is_causal=True)
        return self.head(self.down(self.norm(h)))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        logits = self(x[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), x[:, 1:].reshape(-1))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


@project("recurrent")
def universal_transformer() -> Setup:
    """One transformer layer used twelve times, a tied and factorised embedding."""
    x = torch.randint(0, 40, (32, 13), generator=torch.Generator().manual_seed(0))
    return Setup(UniversalTransformer(), DataLoader(TensorDataset(x), batch_size=8), trainer={"gradient_clip_val": 1.0})


class DEQFixedPoint(nn.Module):
    """Forward iteration without a graph, implicit gradient by a backward hook (as in the NeurIPS tutorial)."""

    def __init__(self, f, tol=1e-4, max_iter=40):
        super().__init__()
        self.f, self.tol, self.max_iter = f, tol, max_iter

    def solve(self, f, z):
        for _ in range(self.max_iter):
            new = f(z)
            if (new - z).norm() / (1e-8 + new.norm()) < self.tol:
                return new
            z = new
        return z

    def forward(self, x):
        with torch.no_grad():
            z = self.solve(lambda z: self.f(z, x), torch.zeros_like(x))
        z = self.f(z, x)
        if self.training:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.f(z0, x)

            def backward_hook(grad):
                return self.solve(lambda y: torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + grad, grad)

            z.register_hook(backward_hook)
        return z


class DEQCell(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(n, 64), nn.Linear(64, n)
        self.norm1, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(n)
        nn.init.normal_(self.fc1.weight, 0, 0.05)
        nn.init.normal_(self.fc2.weight, 0, 0.05)

    def forward(self, z, x):
        return self.norm2(torch.tanh(z + x + 0.1 * self.fc2(self.norm1(F.relu(self.fc1(z))))))


class LitDEQ(Learner):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), DEQFixedPoint(DEQCell(32)), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


@project("recurrent")
def deep_equilibrium_implicit_gradient() -> Setup:
    """A deep equilibrium model: a fixed point without a graph, whose gradient a tensor hook computes by iteration."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(48, 8, generator=g)
    return Setup(LitDEQ(), DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8))


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


def rk4(f, y, ts):
    ys = [y]
    for t0, t1 in itertools.pairwise(ts):
        dt = t1 - t0
        k1 = f(t0, y)
        k2 = f(t0 + dt / 2, y + dt * k1 / 2)
        k3 = f(t0 + dt / 2, y + dt * k2 / 2)
        k4 = f(t1, y + dt * k3)
        y = y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        ys.append(y)
    return torch.stack(ys)


class LitNeuralODE(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.func = ODEFunc()
        self.register_buffer("t", torch.linspace(0.0, 1.5, 31))

    def training_step(self, batch, batch_idx):
        y0, trajectory = batch
        predicted = rk4(self.func, y0, self.t).transpose(0, 1)
        loss = torch.mean(torch.abs(predicted - trajectory))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=1e-3)


@project("recurrent")
def neural_ode_rk4_spiral() -> Setup:
    """A neural ODE by hand: Runge-Kutta, 120 uses of a net per step."""
    a = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    y0 = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    trajectory = rk4(lambda t, y: y**3 @ a, y0, torch.linspace(0.0, 1.5, 31)).transpose(0, 1)
    keep = trajectory.isfinite().flatten(1).all(1) & (y0.norm(dim=1) < 2)
    return Setup(LitNeuralODE(), DataLoader(TensorDataset(y0[keep], trajectory[keep]), batch_size=4))


class Chomp1d(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, c_in, c_out, dilation, kernel=3):
        super().__init__()
        pad = (kernel - 1) * dilation
        conv = nn.utils.parametrizations.weight_norm
        self.net = nn.Sequential(
            conv(nn.Conv1d(c_in, c_out, kernel, padding=pad, dilation=dilation)),
            Chomp1d(pad),
            nn.ReLU(),
            conv(nn.Conv1d(c_out, c_out, kernel, padding=pad, dilation=dilation)),
            Chomp1d(pad),
            nn.ReLU(),
        )
        self.downsample = nn.Conv1d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        return F.relu(self.net(x) + self.downsample(x))


class LitTCN(Learner):
    lr = 2e-3

    def __init__(self):
        super().__init__()
        self.tcn = nn.Sequential(*[TemporalBlock(2 if i == 0 else 8, 8, 2**i) for i in range(3)])
        self.linear = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.linear(self.tcn(x.transpose(1, 2))[:, :, -1]).squeeze(1), y)


@project("recurrent", precisions=("bf16",))
def temporal_convolutional_net_weight_norm() -> Setup:
    """Dilated convolutions with weight norm."""
    return Setup(LitTCN(), DataLoader(AddingProblem(32, 24), batch_size=8), trainer={"gradient_clip_val": 0.5})


class LitDeepSequential(L.LightningModule):
    """Stateful truncated backpropagation by hand: the state goes on from batch to batch, detached."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.lstm = nn.LSTM(4, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def on_train_epoch_start(self):
        self.hiddens = None

    def training_step(self, batch, batch_idx):
        (x,) = batch
        optimizer = self.optimizers()
        for chunk in x.split(8, dim=1):
            out, hiddens = self.lstm(chunk[:, :-1], self.hiddens)
            loss = F.mse_loss(self.head(out), chunk[:, 1:])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm")
            optimizer.step()
            self.hiddens = tuple(h.detach() for h in hiddens)
            self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@project("recurrent")
def truncated_backpropagation_manual() -> Setup:
    """Manual optimization over chunks of a sequence; each chunk begins with the detached state."""
    x = torch.randn(32, 32, 4, generator=torch.Generator().manual_seed(3)).cumsum(1) / 6
    return Setup(LitDeepSequential(), DataLoader(TensorDataset(x), batch_size=8))
