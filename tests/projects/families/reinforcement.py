"""Agents that play in the training step, replay that grows while it is read, several optimizers by hand."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from projects.learner import Learner
from projects.registry import Setup, project


class Experience(NamedTuple):
    state: Any
    action: int
    reward: float
    done: bool
    new_state: Any


class Corridor:
    """A point on a line: push it to the right end. Deterministic, four observations, two actions."""

    def reset(self):
        self.x, self.v, self.t = 0.0, 0.0, 0
        return self.observe()

    def observe(self):
        return torch.tensor([self.x, self.v, self.x * self.v, self.t / 20])

    def step(self, action):
        push = (float(action) - 0.5) * 0.4 if isinstance(action, int) else float(action) * 0.2
        self.v = 0.9 * self.v + push
        self.x, self.t = self.x + self.v, self.t + 1
        done = abs(self.x) > 2 or self.t >= 20
        return self.observe(), self.x - 0.1 * push**2, done


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, size, generator):
        indices = torch.randint(0, len(self.buffer), (size,), generator=generator).tolist()
        return [
            torch.stack([torch.as_tensor(v) for v in c]) for c in zip(*(self.buffer[i] for i in indices), strict=True)
        ]


class RLDataset(IterableDataset):
    def __init__(self, buffer, sample_size=64):
        self.buffer, self.sample_size = buffer, sample_size

    def __iter__(self):
        states, actions, rewards, dones, new_states = self.buffer.sample(
            self.sample_size, torch.Generator().manual_seed(0)
        )
        for i in range(len(dones)):
            yield states[i], actions[i], rewards[i], dones[i], new_states[i]


def net(i, o, h=32):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class DQN(L.LightningModule):
    """As in the Lightning examples: it plays one step per batch and learns from a replay dataset."""

    def __init__(self, sync_rate=3, gamma=0.99):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target_net = net(4, 2), net(4, 2)
        self.env, self.buffer = Corridor(), ReplayBuffer(200)
        self.state, self.actions = self.env.reset(), torch.Generator().manual_seed(0)
        for _ in range(64):
            self.play(epsilon=1.0)

    @torch.no_grad()
    def play(self, epsilon):
        if torch.rand((), generator=self.actions) < epsilon:
            action = int(torch.randint(0, 2, (), generator=self.actions))
        else:
            action = int(self.net(self.state[None].to(self.device)).argmax(1))
        new_state, reward, done = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done

    def training_step(self, batch, nb_batch):
        reward, _ = self.play(max(0.01, 1.0 - self.global_step / 20))
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
            next_values = next_values.detach()
        loss = F.smooth_l1_loss(values, next_values * self.hparams.gamma + rewards)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss}, prog_bar=True)
        return loss

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer), batch_size=16)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), lr=1e-2)


@project("reinforcement")
def dqn_replay_iterable() -> Setup:
    """DQN: the step plays the game, an IterableDataset replays earlier moves, and a target net is updated."""
    return Setup(DQN(), trainer={"max_epochs": 2})


def rollouts(n=64, actions=2):
    """Recorded ones, so that all precisions learn from the same."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(n, 4, generator=g)
    taken = torch.randint(0, actions, (n,), generator=g)
    returns = states[:, 0] * (taken.float() * 2 - 1) + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(states, taken, returns, torch.full((n,), 0.5).log())


class PPO(L.LightningModule):
    """Several epochs of minibatches inside of one training step; CleanRL's losses."""

    def __init__(self, update_epochs=3, minibatches=2, clip=0.2):
        super().__init__()
        self.automatic_optimization = False
        self.update_epochs, self.minibatches, self.clip = update_epochs, minibatches, clip
        self.trunk, self.policy, self.value = (
            nn.Sequential(nn.Linear(4, 32), nn.Tanh()),
            nn.Linear(32, 2),
            nn.Linear(32, 1),
        )
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def training_step(self, batch, batch_idx):
        states, actions, returns, _ = batch
        optimizer = self.optimizers()
        with torch.no_grad():
            h = self.trunk(states)
            old_logprob = Categorical(logits=self.policy(h)).log_prob(actions)
            old_value = self.value(h).squeeze(-1)
        advantages = returns - old_value
        for _ in range(self.update_epochs):
            for mb in torch.randperm(len(states), device=self.device).chunk(self.minibatches):
                h = self.trunk(states[mb])
                dist = Categorical(logits=self.policy(h))
                ratio = (dist.log_prob(actions[mb]) - old_logprob[mb]).exp()
                adv = (advantages[mb] - advantages[mb].mean()) / (advantages[mb].std() + 1e-8)
                pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - self.clip, 1 + self.clip)).mean()
                v_loss = 0.5 * (self.value(h).squeeze(-1) - returns[mb]).pow(2).mean()
                loss = pg_loss + 0.5 * v_loss - 0.01 * dist.entropy().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.log("value", v_loss)
        schedule = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=2.5e-3, eps=1e-5)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)]


@project("reinforcement")
def ppo_epochs_in_a_step() -> Setup:
    """PPO: six clipped optimizer steps in one training step."""
    return Setup(PPO(), DataLoader(rollouts(), batch_size=16))


class PPOManySteps(PPO):
    """The defaults of CleanRL: far more optimizer steps than batches; the returns are as the game gives them."""

    def training_step(self, batch, batch_idx):
        states, actions, returns, logprob = batch
        super().training_step((states, actions, 500 * returns, logprob), batch_idx)


@project("reinforcement")
def ppo_eighty_steps_in_a_batch() -> Setup:
    """PPO with common settings: 20 epochs of 4 minibatches in one training step, without normalised returns."""
    return Setup(PPOManySteps(update_epochs=20, minibatches=4), DataLoader(rollouts(), batch_size=64))


class REINFORCE(Learner):
    """An episode per step, log probabilities collected in a list; the dataset is a dummy."""

    def __init__(self):
        super().__init__()
        self.policy = net(4, 2)
        self.env, self.actions = Corridor(), torch.Generator().manual_seed(0)

    def training_step(self, batch, batch_idx):
        state, log_probs, rewards, done = self.env.reset(), [], [], False
        while not done:
            probs = F.softmax(self.policy(state.to(self.device)), dim=-1)
            # on-policy with common random numbers: rounding rarely changes an action
            action = int(torch.rand((), generator=self.actions) < probs[1])
            log_probs.append(torch.log(probs[action]))
            state, reward, done = self.env.step(action)
            rewards.append(reward)
        returns, total = [], 0.0
        for r in reversed(rewards):
            total = r + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns, device=self.device)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(log_probs) * returns).sum()
        self.log("episode_reward", sum(rewards))
        return loss


@project("reinforcement")
def reinforce_episode_per_step() -> Setup:
    """REINFORCE: each step plays an episode and keeps the log probabilities in a list."""
    return Setup(REINFORCE(), DataLoader(range(8)))


class ActorCritic(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = net(4, 2), net(4, 1)

    def training_step(self, batch, batch_idx):
        states, actions, returns, _ = batch
        opt_actor, opt_critic = self.optimizers()
        value = self.critic(states).squeeze(-1)
        advantage = returns - value
        critic_loss = advantage.pow(2).mean()
        dist = Categorical(logits=self.actor(states))
        actor_loss = -(dist.log_prob(actions) * advantage.detach()).mean() - 0.01 * dist.entropy().mean()
        opt_actor.zero_grad()
        opt_critic.zero_grad()
        self.manual_backward(actor_loss)
        self.manual_backward(critic_loss)
        opt_actor.step()
        opt_critic.step()
        self.log_dict({"actor": actor_loss, "critic": critic_loss})

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.actor.parameters(), lr=7e-4), torch.optim.RMSprop(
            self.critic.parameters(), lr=1e-3
        )


@project("reinforcement")
def actor_critic_two_optimizers() -> Setup:
    """Actor and critic: two backwards, then two steps."""
    return Setup(ActorCritic(), DataLoader(rollouts(), batch_size=8))


class SAC(L.LightningModule):
    """Twin critics, a squashed Gaussian, a learned temperature: three optimizers, polyak targets."""

    def __init__(self, tau=0.05, gamma=0.9):
        super().__init__()
        self.automatic_optimization = False
        self.tau, self.gamma, self.target_entropy = tau, gamma, -1.0
        self.actor = net(4, 2)
        self.critics = nn.ModuleList([net(5, 1), net(5, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def sample(self, state):
        mean, log_std = self.actor(state).chunk(2, dim=-1)
        log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
        normal = Normal(mean, log_std.exp())
        x = mean + log_std.exp() * torch.randn(mean.shape, device=mean.device)
        action = torch.tanh(x)
        log_prob = normal.log_prob(x) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(-1, keepdim=True)

    def q(self, critics, state, action):
        return [c(torch.cat([state, action], dim=-1)) for c in critics]

    def training_step(self, batch, batch_idx):
        state, action, reward, new_state = batch
        opt_actor, opt_critic, opt_alpha = self.optimizers()
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_action, next_log_prob = self.sample(new_state)
            target_q = torch.min(*self.q(self.targets, new_state, next_action)) - alpha * next_log_prob
            y = reward + self.gamma * target_q
        critic_loss = sum(F.mse_loss(q, y) for q in self.q(self.critics, state, action))
        opt_critic.zero_grad()
        self.manual_backward(critic_loss)
        opt_critic.step()

        self.toggle_optimizer(opt_actor)
        new_action, log_prob = self.sample(state)
        actor_loss = (alpha * log_prob - torch.min(*self.q(self.critics, state, new_action))).mean()
        opt_actor.zero_grad()
        self.manual_backward(actor_loss)
        opt_actor.step()
        self.untoggle_optimizer(opt_actor)

        alpha_loss = -(self.log_alpha.exp() * (log_prob + self.target_entropy).detach()).mean()
        opt_alpha.zero_grad()
        self.manual_backward(alpha_loss)
        opt_alpha.step()
        with torch.no_grad():
            for p, t in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                t.data.mul_(1 - self.tau).add_(self.tau * p.data)
        self.log_dict({"critic": critic_loss, "actor": actor_loss, "alpha": alpha_loss})

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.actor.parameters(), lr=1e-3),
            torch.optim.Adam(self.critics.parameters(), lr=1e-3),
            torch.optim.Adam([self.log_alpha], lr=3e-3),
        ]


@project("reinforcement")
def sac_three_optimizers() -> Setup:
    """Soft actor-critic: three optimizers, twin critics, a learned temperature."""
    g = torch.Generator().manual_seed(0)
    s, a = torch.randn(64, 4, generator=g), torch.rand(64, 1, generator=g) * 2 - 1
    data = TensorDataset(s, a, (s[:, :1] * a).clone(), s + 0.1 * a)
    return Setup(SAC(), DataLoader(data, batch_size=8))
