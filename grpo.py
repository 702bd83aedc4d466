"""GRPO from scratch: group advantages, the clipped token loss, the exploration baselines, and one update of the policy.

For a task drawn once, K episodes are rolled out (a *group*).  Every sampled token of episode i gets the
same advantage, and the loss is the clipped surrogate of PPO, averaged over all sampled tokens:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-6)                                            (DeepSeekMath, GRPO)
    rho_t = exp(logp_t - logp_old_t), both at the temperature T_t the token was drawn with      (SGE 3.3)
    loss  = - 1/N sum_t min(rho_t A, clip(rho_t, 1 - eps, 1 + eps) A)        N = sampled tokens of the minibatch

SGE uses "the modifications proposed by DAPO, except clip-higher" (SGE 3.3): token-level loss, groups with
equal rewards dropped, no KL term, symmetric clip 0.2.  What the paper compares with is here, too:

    EntropyAdv   `entropy_bonus`: uncertain tokens get a larger advantage          (Cheng et al. 2025, Eqs. 4-6)
    RND          `RND`, `novelty`: failed episodes are paid for unfamiliar steps        (i-MENTOR; SGE A.4)
    RLAD         `k3`: a KL term to the start policy; a share of episodes goes without strategy (train.py)  (SGE A.4)

How this differs from the paper, and what it leaves open:
  1. A minibatch is a number of environment steps there (Table 2).  Here an episode's steps are one
     sequence, so a minibatch is whole episodes that together have at least that many steps.
  2. Standard deviation: unbiased, epsilon 1e-6 (the paper does not say; `std`).
  3. Groups with equal rewards are dropped without refill: Table 2 fixes the number collected per update
     (train.py has `refill`).  What is dropped is in no divisor and gets no KL term either.
  4. Reflected episodes share the group of the plain ones (`advantage_groups` = joint), or are compared
     among themselves (split).
  5. RND: sizes, coefficient, decay and place of the bonus are not stated; it is added after the group's
     normalisation to all tokens of a step, and groups without a success are dropped before it (`rnd_groups`).

How the update is computed, all of it exact: the model runs to the last hidden states; the head and its
log-softmax then see the sampled positions only, a bounded number at a time, with the graph cut at the hidden
states, so that no (tokens, vocabulary) tensor outlives its chunk.  Where many rows begin with the same prompt
it is read once (`SharedPrompts`), the graph being cut at its keys and values in the same way.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

import parallel
from policy import Policy
from sampler import STRATEGY, Episode, attending

# ------------------------------------------------------------------------------------------------------
# advantages
# ------------------------------------------------------------------------------------------------------


def group_advantages(rewards: list[float], groups: list, std: str = "unbiased", eps: float = 1e-6) -> list[float]:
    """A_i = (r_i - mean) / (std + eps) within each group; 0 where all rewards of a group are equal.

    rewards (n,), groups (n,) hashable: which episodes belong together - by the draw of the task, never by
    the text of the prompt.  std: "unbiased" (n - 1), "biased" (n), or "none": A = r - mean (Dr. GRPO).

    >>> [round(a, 4) for a in group_advantages([1, 0, 0, 0], ["a", "a", "a", "a"])]
    [1.5, -0.5, -0.5, -0.5]
    """
    members = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    advantages = [0.0] * len(rewards)
    for rows in members.values():
        mine = [float(rewards[i]) for i in rows]
        if max(mine) - min(mine) < 1e-8:  # a floor, not "== 0": rounding must not become an advantage
            continue
        mean = sum(mine) / len(mine)
        spread = (sum((r - mean) ** 2 for r in mine) / (len(mine) - (std == "unbiased"))) ** 0.5
        for i in rows:
            advantages[i] = (rewards[i] - mean) / (1.0 if std == "none" else spread + eps)
    return advantages


def scorable(episode: Episode) -> bool:
    """False where the world failed, not the agent: no reward, no part in any baseline, loss or rate.

    An episode that ran out of context is the agent's own failure, hence scorable.
    """
    return episode.finish != "error" and episode.reward is not None and not math.isnan(episode.reward)


def overlong_penalty(length: int, longest: int, cache: int) -> float:
    """DAPO Eq. 13, added to the reward: 0 up to longest - cache sampled tokens, then on a line to -1 at `longest`.

    >>> [overlong_penalty(n, 100, 20) for n in (80, 81, 90, 100, 101)]
    [0.0, -0.05, -0.5, -1.0, -1.0]
    """
    return min(0.0, max(-1.0, (longest - cache - length) / cache))


def cut_off(episode: Episode) -> bool:
    """Did the length limit end this episode, or one of its replies?"""
    return episode.finish == "context" or any(turn.finish == "length" for turn in episode.turns)


def advantage_key(episode: Episode, groups: str):
    """Which episodes share a baseline."""
    return episode.group if groups == "joint" else (episode.group, episode.reflection.mode)


def groups_with_signal(episodes: list[Episode], how: "UpdateSettings") -> set:
    """Keys of the groups that are trained on, each as a whole: their RAW rewards differ (DAPO's dynamic
    sampling, without refill), and the share of successes lies in the band (the positive-ratio filter)."""
    rewards = defaultdict(list)
    for e in episodes:
        if scorable(e):
            rewards[advantage_key(e, how.advantage_groups)].append(e.reward)
    kept = set()
    for key, mine in rewards.items():
        successes = sum(r > 0 for r in mine) / len(mine)
        hopeless = how.rnd_groups == "all" and successes == 0  # nobody succeeded, yet novelty tells them apart
        if hopeless or (max(mine) - min(mine) >= 1e-8 and how.success_low <= successes <= how.success_high):
            kept.add(key)
    return kept


def select(episodes: list[Episode], how: "UpdateSettings") -> list[tuple[Episode, float]]:
    """The episodes to train on with their advantages.

    Unscorable ones are nowhere.  The filter looks at raw rewards; advantages are those of shaped ones.  Masked
    for their length (`overlong_mask`), episodes still count in the baseline.
    """
    episodes = [e for e in episodes if scorable(e)]
    keys = [advantage_key(e, how.advantage_groups) for e in episodes]
    rewards = [e.reward for e in episodes]
    if how.overlong_max:
        rewards = [r + overlong_penalty(sum(e.mask), how.overlong_max, how.overlong_cache)
                   for r, e in zip(rewards, episodes, strict=True)]  # fmt: skip
    kept = groups_with_signal(episodes, how)
    scored = zip(episodes, group_advantages(rewards, keys, how.std), keys, strict=True)
    pairs = [(e, a) for e, a, key in scored if key in kept and not (how.overlong_mask and cut_off(e))]
    if how.skip_advantage == "zero":  # RLAD Eq. 3: episodes without a strategy feel the KL term only
        pairs = [(e, 0.0 if e.reflection.mode == "bare" else a) for e, a in pairs]
    return pairs


# ------------------------------------------------------------------------------------------------------
# loss
# ------------------------------------------------------------------------------------------------------


def clipped_loss(logps, old_logps, advantages, clip: float = 0.2, clip_high: float | None = None):
    """The clipped surrogate of each token (PPO eq. 7), as a loss.

    logps, old_logps, advantages: (N,).  Returns (losses (N,), clipped (N,) bool: where the clip cut the gradient).
    clip_high: another upper bound (DAPO's clip-higher, which SGE leaves out); None: symmetric.

    With eps = 0.2, ratio 1.35 and advantage 1 the objective is 1.2; ratio 0.7 and advantage -1 give -0.8.
    """
    ratio = (logps - old_logps).exp()
    bounded = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    return losses, (bounded * advantages < ratio * advantages)


def k3(logps, reference):
    """KL(policy || reference) of each token, estimated from the token that was sampled (k3; DeepSeekMath Eq. 4).

    pi_ref/pi - log(pi_ref/pi) - 1: never negative, 0 at equality.  Policy .5 and reference .25 give .1931.
    """
    difference = reference - logps
    return difference.exp() - difference - 1


def loss_weights(lengths: list[int], norm: str, constant: int = 1) -> list[float]:
    """What one token of each episode counts in a minibatch's loss.  lengths: sampled tokens of each episode.

    token: one mean over all tokens (DAPO); sequence: the mean of the episodes' means (GRPO); constant: the sum
    over episodes * constant (Dr. GRPO).  The weights belong to the minibatch, however it is cut up afterwards.

    >>> [loss_weights([2, 8], norm, 16) for norm in ("token", "sequence", "constant")]
    [[0.1, 0.1], [0.25, 0.0625], [0.03125, 0.03125]]
    """
    if norm == "sequence":
        return [1 / (len(lengths) * n) for n in lengths]
    return [1 / (sum(lengths) if norm == "token" else len(lengths) * constant)] * len(lengths)


# ------------------------------------------------------------------------------------------------------
# the baselines
# ------------------------------------------------------------------------------------------------------


def entropy_bonus(advantages, entropy, alpha: float = 0.4, kappa: float = 2.0):
    """EntropyAdv (Cheng et al. 2025, Eqs. 4-6): what is added to each token's advantage, min(alpha H, |A| / kappa).

    entropy (N,): of the current policy over the full vocabulary at the token's temperature; no gradient flows
    through it.  As kappa > 1 no sign ever flips.  A = -1 and H = 2 make -0.5, A = 0 stays 0.
    """
    return torch.minimum(alpha * entropy.detach(), advantages.abs() / kappa)


class RND:
    """Random network distillation: a frozen random net and one that learns to predict it (SGE A.4).

    What the second cannot predict yet is new.  Inputs are last hidden states at the end of each step, detached,
    in float32.  Sizes, learning rate and the running standard deviation are ours (the paper states none).
    """

    def __init__(self, width: int, hidden: int = 128, lr: float = 1e-3, seed: int = 0, device="cpu"):
        with torch.random.fork_rng():  # the run's own random stream does not move
            torch.manual_seed(seed)
            self.target, self.predictor = (
                torch.nn.Sequential(torch.nn.Linear(width, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, hidden)).to(device)
                for _ in range(2)
            )
        self.target.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.predictor.parameters(), lr=lr)
        self.updates = 0
        self.seen = [0, 0.0, 0.0]  # Welford: count, mean, sum of squared distances from the mean of all errors

    def errors(self, features: torch.Tensor) -> torch.Tensor:
        """||f(y) - f_bar(y)||^2 of features (n, d): (n,)."""
        return (self.predictor(features) - self.target(features)).square().sum(-1)

    def observe(self, errors: list[float]) -> float:
        """Take errors into the running statistics; returns the standard deviation of all that was ever seen."""
        for error in errors:
            self.seen[0] += 1
            before = error - self.seen[1]
            self.seen[1] += before / self.seen[0]
            self.seen[2] += before * (error - self.seen[1])
        return (self.seen[2] / max(1, self.seen[0] - 1)) ** 0.5

    def learn(self, features: torch.Tensor) -> None:
        """One step of the predictor (one a rollout batch, after the bonus was taken)."""
        self.errors(features).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    def state_dict(self) -> dict:
        parts = {name: getattr(self, name).state_dict() for name in ("target", "predictor", "optimizer")}
        return parts | {"seen": list(self.seen), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        for name in ("target", "predictor", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.seen, self.updates = list(state["seen"]), state["updates"]


def rnd_scale(errors: torch.Tensor, norm: str, std: float) -> torch.Tensor:
    """Errors -> bonuses.  std: e / std(e) (SGE A.4); minmax: 0.5 (e - min) / (max - min) of the batch (i-MENTOR)."""
    if norm == "std":
        return errors / (std + 1e-8)
    return 0.5 * (errors - errors.min()) / (errors.max() - errors.min()).clamp(min=1e-8)


def rnd_coefficient(coef: float, decay: int, updates: int) -> float:
    """coef * decay / (decay + updates): i-MENTOR halves it in 40 updates; decay 0 keeps it."""
    return coef * decay / (decay + updates) if decay else coef


def novelty(model, rows: list["Row"], rnd: RND, how: "UpdateSettings") -> dict:
    """Add the RND bonus to the advantages of failed episodes, then let the predictor learn.  Returns metrics."""
    failed = [row for row in rows if row.reward == 0]
    if not failed:
        return {}
    features, steps = [], []  # (replies of a piece, d); rows and the number of each sampled token's reply
    for piece in micro_batches(failed, how.micro_tokens):
        with torch.no_grad():
            ends = [row.reply_ends() for row in piece]
            features.append(hidden_states(model, piece, at=ends).float())
        steps += zip(piece, ends, strict=True)
    features = torch.cat(features)
    with torch.no_grad():
        errors = rnd.errors(features)
    bonus = rnd_scale(errors, how.rnd_norm, rnd.observe(errors.tolist()))
    bonus = rnd_coefficient(how.rnd_coef, how.rnd_decay, rnd.updates) * bonus
    first = 0
    for row, ends in steps:  # token t belongs to the reply whose end is the first at or after t
        row.advantage = row.advantage + bonus[first : first + len(ends)][torch.searchsorted(ends, row.at)]
        first += len(ends)
    rnd.learn(features)
    return {"rnd_error": errors.mean().item(), "rnd_bonus": bonus.mean().item()}


# ------------------------------------------------------------------------------------------------------
# from episodes to tensors
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateSettings:
    """How one batch of episodes changes the policy (SGE Table 2 unless said otherwise)."""

    clip: float = 0.2
    epochs: int = 2
    minibatch_steps: int = 768  # environment steps a minibatch has at least (Table 2: 64 or 128)
    micro_tokens: int = 2048  # padded tokens whose graph is in memory at a time: memory, not arithmetic
    max_grad_norm: float = 1.0  # [not in the paper]
    advantage_groups: str = "joint"  # joint | split: are reflected episodes compared with plain ones?
    ratio_tolerance: float = 1e-4  # allowed distance of the first minibatch's ratio from 1
    std: str = "unbiased"  # unbiased | biased | none
    success_low: float = 0.0  # groups whose share of successes is outside this band are dropped
    success_high: float = 1.0
    clip_high: float | None = None  # DAPO: 0.28; None: symmetric
    loss_norm: str = "token"  # token | sequence | constant
    loss_constant: int = 512  # divisor per episode of loss_norm = constant
    kl: float = 0.0  # weight of the KL term to the start policy (RLAD: 0.001)
    overlong_mask: bool = False  # leave episodes that the length limit cut off out of the loss
    overlong_max: int = 0  # soft overlong punishment (DAPO Eq. 13): sampled tokens at which it is -1; 0: none
    overlong_cache: int = 1  # ... and over how many tokens it grows
    entropy_alpha: float = 0.0  # EntropyAdv: 0.4; 0: off
    entropy_kappa: float = 2.0
    rnd_coef: float = 0.1  # RND: weight of the bonus [open]
    rnd_decay: int = 0  # updates in which it is halved (i-MENTOR: 40); 0: never
    rnd_norm: str = "std"  # std | minmax
    rnd_groups: str = "mixed"  # mixed: groups without a success are dropped before RND acts | all: they are kept
    skip_advantage: str = "group"  # RLAD, episodes without strategy: the group's advantage | zero (RLAD Eq. 3)
    checkpointing: bool = False  # recompute layers in the backward pass: less memory, a third more time


class Row:
    """An episode as the update needs it, made once: vectors with one entry per sampled token (n,)."""

    def __init__(self, episode: Episode, advantage: float, device):
        at = [i for i, sampled in enumerate(episode.mask) if sampled]

        def vector(values, dtype=torch.float32):
            return torch.tensor([values[i] for i in at], dtype=dtype, device=device)

        self.ids = torch.tensor(episode.ids[: at[-1] + 1], device=device)  # what follows the last reply has no effect
        self.at = torch.tensor(at, device=device)  # where they stand
        self.targets, self.temps = vector(episode.ids, torch.long), vector(episode.temps)
        self.old = vector(episode.logprobs)
        self.hot = vector(episode.segments, torch.long) == STRATEGY
        self.advantage = torch.full_like(self.old, advantage)
        self.weight = torch.zeros_like(self.old)  # set for each minibatch
        self.reference = self.old  # set if there is a KL term
        self.reward, self.steps = episode.reward, len(episode.turns)
        self.prompt = at[0] - 1  # tokens before the one that predicts the first sampled one: what rows can share
        self.prompt_key = tuple(episode.ids[: self.prompt])

    def reply_ends(self) -> torch.Tensor:
        """Positions of the last token of each reply."""
        return self.at[torch.cat([self.at[1:] != self.at[:-1] + 1, self.at.new_ones(1, dtype=torch.bool)])]


def minibatches(rows: list[Row], steps: int, generator: torch.Generator) -> list[list[Row]]:
    """Shuffle rows and cut them where a minibatch has `steps` environment steps.

    What is left over joins the last minibatch, so that none is much smaller than the others.
    """
    order = torch.randperm(len(rows), generator=generator).tolist()
    batches, size = [[]], 0
    for i in order:
        if size >= steps:
            batches.append([])
            size = 0
        batches[-1].append(rows[i])
        size += rows[i].steps
    if len(batches) > 1 and size < steps / 2:
        rest = batches.pop()  # (not `batches[-2] += batches.pop()`: the index is evaluated again after the pop)
        batches[-1] += rest
    return batches


def micro_batches(rows: list[Row], tokens: int, shared: bool = False) -> list[list[Row]]:
    """Cut rows, sorted by length, into pieces of at most `tokens` padded tokens (at least one row each).
    shared: prompts are read elsewhere and do not count."""

    def length(row: Row) -> int:
        return len(row.ids) - row.prompt * shared

    pieces: list[list] = [[]]
    for row in sorted(rows, key=length):
        if pieces[-1] and length(row) * (len(pieces[-1]) + 1) > tokens:
            pieces.append([])
        pieces[-1].append(row)
    return pieces if rows else []


# ------------------------------------------------------------------------------------------------------
# the forward pass
# ------------------------------------------------------------------------------------------------------


class SharedPrompts:
    """The distinct prompts of some rows, read once.  Each row then attends to the keys and values of its own.

    The graph is cut at the keys and values: rows, piece by piece, leave their gradients at copies of them, and
    `backward` sends the sums on through the prompts.  It plays the part of a Hugging Face cache: attention
    layers call `update`.
    """

    is_compileable = False

    def __init__(self, model, rows: list[Row]):
        self.model, self.own, self.cut = model, [], []
        device = rows[0].ids.device
        self.number = {key: i for i, key in enumerate({row.prompt_key: None for row in rows})}
        ids = pad_sequence([torch.tensor(key, dtype=torch.long) for key in self.number], batch_first=True).to(device)
        self.length = torch.tensor([len(key) for key in self.number], device=device)
        here = torch.arange(ids.shape[1], device=device)
        mask = attention_mask(self.model, (here[None] <= here[:, None])[None, None])  # plain causal: padding comes last
        self._run(ids, mask.expand(len(ids), -1, -1, -1), here.expand_as(ids))
        self.cut = [[tensor.detach().requires_grad_() for tensor in pair] for pair in self.own]

    def read(self, rows: list[Row], ids: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, L, d) of ids (B, L): what follows each row's prompt, padded on the right."""
        self.which = torch.tensor([self.number[row.prompt_key] for row in rows], device=ids.device)
        length, here = self.length[self.which, None], torch.arange(ids.shape[1], device=ids.device)
        slots = torch.arange(self.cut[0][0].shape[2], device=ids.device)
        past = (slots < length)[:, None, None].expand(-1, 1, len(here), -1)  # (B, 1, L, longest prompt)
        causal = (here[None] <= here[:, None]).expand(len(ids), 1, -1, -1)  # (B, 1, L, L)
        return self._run(ids, attention_mask(self.model, torch.cat([past, causal], -1)), length + here)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args, **kwargs):
        """(B, kv heads, L, head dim) of one layer -> the same with each row's prompt before it."""
        if not self.cut:  # the prompts themselves are being read
            self.own.append((keys, values))
            return keys, values
        past = [tensor.index_select(0, self.which) for tensor in self.cut[layer]]
        return torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # asked for by models when positions are not given; here they always are

    def backward(self) -> None:
        pairs = [(own, cut.grad) for a, b in zip(self.own, self.cut, strict=True) for own, cut in zip(a, b, strict=True)]
        torch.autograd.backward(*zip(*[(own, grad) for own, grad in pairs if grad is not None], strict=True))

    def _run(self, ids, mask, positions):
        attention = self.model.config._attn_implementation
        if attention == "sdpa" and ids.device.type == "cpu":
            attention = "unrepeated"
        with attending(self.model, attention):
            return self.model.base_model(
                input_ids=ids, attention_mask=mask, position_ids=positions, cache=self, use_cache=True
            ).last_hidden_state


def unrepeated_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention under a mask as Hugging Face's "sdpa", except that key/value heads are not copied for each of their
    query heads: a tenth of an update's time with SmolLM2 on a CPU.  (CUDA has no fast kernel for a mask and shared
    heads together.)

    query (B, heads, L, d); key, value (B, kv heads, S, d); attention_mask (B, 1, L, S), True where a token may look.
    Returns ((B, L, heads, d), None).
    """
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, scale=scaling, enable_gqa=key.shape[1] < query.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("unrepeated", unrepeated_attention)


def attention_mask(model, allowed: torch.Tensor) -> torch.Tensor:
    """A mask as the model's attention wants it: boolean for SDPA, additive for all other implementations
    (to which True would mean "add 1")."""
    if getattr(model.config, "_attn_implementation", "sdpa") == "sdpa":
        return allowed
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill(~allowed, lowest)


def worth_sharing(rows: list[Row]) -> bool:
    """Would reading each distinct prompt once save enough tokens to pay for an extra pass and a denser mask?"""
    distinct = sum(len(key) for key in {row.prompt_key for row in rows})
    saved = sum(row.prompt for row in rows) - distinct
    return saved > SHARING_PAYS * sum(len(row.ids) for row in rows)


SHARING_PAYS = 0.15


def bundles(rows: list[Row], tokens: int) -> list[list[Row]]:
    """Put rows with equal prompts together, then cut where the distinct prompts have `tokens` tokens: the graph
    of a bundle's prompts is in memory until its last row is done."""
    by_prompt = defaultdict(list)
    for row in rows:
        by_prompt[row.prompt_key].append(row)
    made, size = [[]], 0
    for key, mine in by_prompt.items():
        if made[-1] and size + len(key) > tokens:
            made.append([])
            size = 0
        made[-1] += mine
        size += len(key)
    return made


def hidden_states(model, rows: list[Row], prompts: SharedPrompts | None = None, at=None) -> torch.Tensor:
    """Last hidden states (N, d), row by row: where each sampled token is predicted, or at positions `at`.

    Padding is on the right and attention is causal, so no real token can see padding and positions count
    from 0 in every row: no attention mask is needed.
    """
    first = [row.prompt if prompts else 0 for row in rows]
    ids = pad_sequence([row.ids[start:] for row, start in zip(rows, first, strict=True)], batch_first=True)  # (B, L)
    if prompts:
        hidden = prompts.read(rows, ids)
    else:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    at = [row.at - 1 for row in rows] if at is None else at  # token t is predicted from position t - 1
    flat = [a - start + i * ids.shape[1] for i, (a, start) in enumerate(zip(at, first, strict=True))]
    return hidden.flatten(0, 1).index_select(0, torch.cat(flat))


class ChosenLogprobs(torch.autograd.Function):
    """(n, V) logits -> log-probs of chosen tokens (n,) and entropies (n,), at each token's temperature, in float32.

        logp_t = log_softmax(logits_t / T_t)[token_t]        d logp_t / d logits_t = (onehot - p_t) / T_t

    One (n, V) tensor, p, is kept for the backward pass.  No gradient flows through the entropy.
    """

    @staticmethod
    def forward(ctx, logits, targets, temps):
        logps = logits.float() / temps[:, None]
        logps -= logps.logsumexp(-1, keepdim=True)
        chosen = logps.gather(-1, targets[:, None]).squeeze(-1)
        probs = logps.exp()
        entropy = -logps.mul_(probs).sum(-1)
        ctx.save_for_backward(probs, targets, temps)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx, grad, _):
        probs, targets, temps = ctx.saved_tensors
        scale = (grad / temps)[:, None]  # (n, 1)
        return (probs * -scale).scatter_add_(-1, targets[:, None], scale).to(ctx.dtype), None, None


HEAD_NUMBERS = 1 << 21  # logits held at a time (8 MB) ...
HEAD_ROWS = 256  # ... but never fewer positions than make a good matrix product


def head_chunks(model, n: int) -> list[slice]:
    """Cut n positions into pieces for the head."""
    size = max(HEAD_ROWS, HEAD_NUMBERS // model.get_output_embeddings().weight.shape[0])
    return [slice(i, i + size) for i in range(0, n, size)]


def token_vectors(rows: list[Row]) -> dict[str, torch.Tensor]:
    """The rows' own vectors, end to end: (N,) each."""
    names = ("targets", "temps", "old", "hot", "advantage", "weight", "reference")
    return {name: torch.cat([getattr(row, name) for row in rows]) for name in names}


@torch.no_grad()
def set_reference(rows: list[Row], reference, micro_tokens: int) -> None:
    """Let each row hold the log-probs of the start policy, each at its token's own temperature."""
    for piece in micro_batches(rows, micro_tokens):
        hidden, head = hidden_states(reference, piece), reference.get_output_embeddings()
        tokens = token_vectors(piece)
        logps = [ChosenLogprobs.apply(head(hidden[c]), tokens["targets"][c], tokens["temps"][c])[0]
                 for c in head_chunks(reference, len(hidden))]  # fmt: skip
        for row, own in zip(piece, torch.cat(logps).split([len(row.at) for row in piece]), strict=True):
            row.reference = own


# ------------------------------------------------------------------------------------------------------
# one update
# ------------------------------------------------------------------------------------------------------


def token_losses(tokens: dict, logps, entropy, how: UpdateSettings) -> tuple:
    """The loss of each token of a chunk: (losses, clipped, what else is worth a metric), (n,) each."""
    advantages, extra = tokens["advantage"], {}
    if how.entropy_alpha:
        extra["entropy_bonus"] = entropy_bonus(advantages, entropy, how.entropy_alpha, how.entropy_kappa)
        advantages = advantages + extra["entropy_bonus"]
    losses, clipped = clipped_loss(logps, tokens["old"], advantages, how.clip, how.clip_high)
    if how.kl:
        extra["kl"] = k3(logps, tokens["reference"])
        losses = losses + how.kl * extra["kl"]
    return losses, clipped, extra


def learn_from(model, rows: list[Row], prompts: SharedPrompts | None, how: UpdateSettings, count) -> None:
    """Add the gradients of a micro-batch.  count(tokens, logps, entropy, losses, clipped, extra) sees every chunk.

    The graph is cut at the hidden states: each chunk of the head runs backward at once and leaves its share there.
    """
    hidden, tokens = hidden_states(model, rows, prompts), token_vectors(rows)
    gradient = torch.zeros_like(hidden)
    for chunk in head_chunks(model, len(hidden)):
        own = {name: vector[chunk] for name, vector in tokens.items()}
        leaf = hidden[chunk].detach().requires_grad_()
        logps, entropy = ChosenLogprobs.apply(model.get_output_embeddings()(leaf), own["targets"], own["temps"])
        losses, clipped, extra = token_losses(own, logps, entropy, how)
        (losses * own["weight"]).sum().backward()
        gradient[chunk] = leaf.grad
        with torch.no_grad():
            count(own, logps, entropy, losses, clipped, extra)
    hidden.backward(gradient)


def share(rows: list[Row]) -> list[Row]:
    """The rows of a minibatch that this process computes: about as many tokens as any other's, equal prompts together."""
    processes = parallel.world_size()
    if processes == 1:
        return rows
    rows = sorted(rows, key=lambda row: row.prompt_key)
    total, before, mine = sum(len(row.ids) for row in rows), 0, []
    for row in rows:
        if before * processes // total == parallel.rank():
            mine.append(row)
        before += len(row.ids)
    return mine


def minibatch_gradients(model, rows: list[Row], how: UpdateSettings, count) -> None:
    """Add the gradients of a minibatch's loss, piece by piece.  Its weights are those of the whole minibatch, however
    many processes share its rows: so the sum of their gradients is the gradient."""
    lengths = [len(row.at) for row in rows]
    for row, weight in zip(rows, loss_weights(lengths, how.loss_norm, how.loss_constant), strict=True):
        row.weight.fill_(weight)
    rows = share(rows)
    shared = not how.checkpointing and worth_sharing(rows)
    most = how.micro_tokens // (2 if shared else 1)  # the graphs of prompts and of a piece are in memory together
    for bundle in bundles(rows, most) if shared else [rows]:
        prompts = SharedPrompts(model, bundle) if shared else None
        for piece in micro_batches(bundle, most, shared):
            learn_from(model, piece, prompts, how, count)
        if prompts:
            prompts.backward()
    parallel.sum_gradients(model)


def optimizer_step(model, optimizer, max_norm: float) -> float | None:
    """Clip the gradient and step.  Returns its norm, or None if it is not finite: then the step is skipped, since
    it would poison weights and moments for good."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    finite = bool(torch.isfinite(norm))
    if finite:
        optimizer.step()
    else:
        print(f"skipped an optimiser step: gradient norm {norm.item()}", flush=True)
    optimizer.zero_grad(set_to_none=True)
    return norm.item() if finite else None


def update(
    policy: Policy, optimizer, episodes: list[Episode], how: UpdateSettings, generator: torch.Generator,
    rnd: RND | None = None, reference=None,
) -> dict:  # fmt: skip
    """One GRPO update: drop groups without signal, then `epochs` passes of minibatch steps.

    rnd: the networks of that baseline; reference: the start policy's model, needed if there is a KL term.
    Several processes must all be given the same episodes, and a generator in the same state.
    Returns the metrics of the update.  Raises FloatingPointError if the very first minibatch's ratio is not
    1 within `ratio_tolerance`: then sampling and training disagree, and nothing that follows can be trusted.
    """
    if any(t == 0 for e in episodes for t, m in zip(e.temps, e.mask, strict=True) if m):
        raise ValueError("episodes sampled at temperature 0 cannot be trained on: their log-probs have no gradient")
    model, scored = policy.model, sum(map(scorable, episodes))
    pairs = select(episodes, how)
    rows = [Row(e, a, policy.device) for e, a in pairs if any(e.mask)]
    metrics = {"kept": len(pairs) / max(1, scored), "unscorable": len(episodes) - scored}
    metrics |= {"skipped_steps": 0, "optimizer_steps": 0}
    set_checkpointing(model, how.checkpointing)
    if rnd is not None:
        metrics |= novelty(model, rows, rnd, how)
    if how.kl:
        set_reference(rows, reference, how.micro_tokens)
    sums: dict[str, float] = defaultdict(float)
    for epoch in range(how.epochs if rows else 0):
        for batch in minibatches(rows, how.minibatch_steps, generator):
            first = metrics["optimizer_steps"] + metrics["skipped_steps"] == 0
            minibatch_gradients(model, batch, how, partial(_count, sums, first, epoch))
            if first:
                metrics |= _first_ratio(sums, model, optimizer, how)
            norm = optimizer_step(model, optimizer, how.max_grad_norm)
            metrics["skipped_steps" if norm is None else "optimizer_steps"] += 1
            sums["grad_norm"] += (norm or 0.0) if parallel.first() else 0.0  # of all, hence counted by one
    parallel.same_weights(model)
    return metrics | _means(_total(sums), metrics, how)


def set_checkpointing(model, on: bool) -> None:
    """Recompute each layer in the backward pass instead of keeping what is inside it.

    Hugging Face does so for layers in training mode only; the mode is set on the layers themselves and not on
    what is in them, so that dropout stays off.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if on and not layers:
        raise ValueError(f"gradient checkpointing is not known for {type(model).__name__}: leave it off")
    for layer in layers:
        layer.gradient_checkpointing = layer.training = on
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def _count(sums: dict, first: bool, epoch: int, tokens: dict, logps, entropy, losses, clipped, extra: dict) -> None:
    """Add a chunk to the running sums.  `first`: it belongs to the very first minibatch."""
    sums["tokens"] += len(losses)
    sums["loss"] += (losses * tokens["weight"]).sum().item()
    sums["clip_fraction"] += clipped.sum().item()
    for name, values in extra.items():
        sums[name] += values.sum().item()
    for name, where in (("strategy", tokens["hot"]), ("action", ~tokens["hot"])):
        if epoch == 0:  # entropy of the policy that is being left
            sums[f"{name}_tokens"] += where.sum().item()
            sums[f"{name}_entropy"] += entropy[where].sum().item()
        if first and where.any():
            off = ((logps - tokens["old"])[where].exp() - 1).abs().nan_to_num(nan=float("inf")).max().item()
            sums[f"{name}_ratio_off"] = max(sums[f"{name}_ratio_off"], off)


def _first_ratio(sums: dict, model, optimizer, how: UpdateSettings) -> dict:
    names = ("strategy", "action")
    off = {f"first_ratio_off_{name}": max(parallel.gather([sums[f"{name}_ratio_off"]])) for name in names}
    if model.dtype == torch.float32 and max(off.values()) > how.ratio_tolerance:
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the first minibatch's ratio is off by {max(off.values()):.1e} (allowed {how.ratio_tolerance:.0e}): log-probs "
            "in training are not those of sampling"
        )
    return off


def _total(sums: dict) -> dict:
    """The sums over all processes' chunks."""
    total: dict[str, float] = defaultdict(float)
    for part in parallel.gather([dict(sums)]):
        for name, amount in part.items():
            total[name] += amount
    return total


def _means(sums: dict, metrics: dict, how: UpdateSettings) -> dict:
    """The means of an update's sums.  What there was nothing to average over is left out: a 0 would read as a measurement."""
    divisors = {
        "loss": metrics["optimizer_steps"] + metrics["skipped_steps"],
        "clip_fraction": sums["tokens"],
        "grad_norm": metrics["optimizer_steps"],
        "strategy_entropy": sums["strategy_tokens"],
        "action_entropy": sums["action_tokens"],
        "entropy_bonus": sums["tokens"] if how.entropy_alpha else 0,
        "kl": sums["tokens"] if how.kl else 0,
    }
    return {name: sums[name] / n for name, n in divisors.items() if n}
