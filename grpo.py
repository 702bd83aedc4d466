"""GRPO from scratch: group advantages, the clipped token loss, and one update of the policy.

For a task drawn once, K episodes are rolled out (a *group*).  Every sampled token of episode i gets the
same advantage, and the loss is the clipped surrogate of PPO, averaged over all sampled tokens:

    A_i   = (r_i - mean(r)) / (std(r) + 1e-6)                                            (DeepSeekMath, GRPO)
    rho_t = exp(logp_t - logp_old_t), both at the temperature T_t the token was drawn with      (SGE 3.3)
    loss  = - 1/N sum_t min(rho_t A, clip(rho_t, 1 - eps, 1 + eps) A)        N = sampled tokens of the minibatch

SGE uses "the modifications proposed by DAPO, except clip-higher" (SGE 3.3): token-level loss, groups with
equal rewards dropped, no KL term, symmetric clip 0.2.

How this differs from the paper, and what it leaves open:
  1. A minibatch is a number of environment steps there (Table 2).  Here an episode's steps are one
     sequence, so a minibatch is whole episodes that together have at least that many steps.
  2. Standard deviation: unbiased, epsilon 1e-6 (the paper does not say).
  3. Groups with equal rewards are dropped without refill: Table 2 fixes the number collected per update.
  4. Reflected episodes share the group of the plain ones (`advantage_groups` = joint), or are compared
     among themselves (split).
"""

from collections import defaultdict
from dataclasses import dataclass

import torch

from policy import Policy, pad, token_logprobs
from sampler import STRATEGY, Episode

# ------------------------------------------------------------------------------------------------------
# advantages
# ------------------------------------------------------------------------------------------------------


def group_advantages(rewards: list[float], groups: list, eps: float = 1e-6) -> list[float]:
    """A_i = (r_i - mean) / (std + eps) within each group; 0 where all rewards of a group are equal.

    rewards (n,), groups (n,) hashable: which episodes belong together - by the draw of the task, never by
    the text of the prompt.  The standard deviation is the unbiased one (n - 1).

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
        std = (sum((r - mean) ** 2 for r in mine) / (len(mine) - 1)) ** 0.5
        for i in rows:
            advantages[i] = (rewards[i] - mean) / (std + eps)
    return advantages


# ------------------------------------------------------------------------------------------------------
# loss
# ------------------------------------------------------------------------------------------------------


def clipped_loss(logps, old_logps, advantages, clip: float = 0.2):
    """The clipped surrogate of each token (PPO eq. 7), as a loss.

    logps, old_logps, advantages: (N,).  Returns (losses (N,), clipped (N,) bool: where the clip cut the gradient).

    With eps = 0.2, ratio 1.35 and advantage 1 the objective is 1.2; ratio 0.7 and advantage -1 give -0.8.
    """
    ratio = (logps - old_logps).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    return losses, (bounded * advantages < ratio * advantages)


# ------------------------------------------------------------------------------------------------------
# one update
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateSettings:
    """How one batch of episodes changes the policy (SGE Table 2 unless said otherwise)."""

    clip: float = 0.2
    epochs: int = 2
    minibatch_steps: int = 512  # environment steps a minibatch has at least (Table 2: 64 or 128)
    micro_tokens: int = 4096  # padded tokens in one forward pass: memory, not arithmetic
    max_grad_norm: float = 1.0  # [not in the paper]
    advantage_groups: str = "joint"  # joint | split: are reflected episodes compared with plain ones?
    ratio_tolerance: float = 1e-4  # allowed distance of the first minibatch's ratio from 1


def advantage_key(episode: Episode, groups: str):
    """Which episodes share a baseline."""
    return episode.group if groups == "joint" else (episode.group, episode.reflection.mode)


def minibatches(episodes: list, steps: int, generator: torch.Generator) -> list[list]:
    """Shuffle (episode, advantage) pairs and cut them where a minibatch has `steps` environment steps.

    What is left over joins the last minibatch, so that none is much smaller than the others.
    """
    order = torch.randperm(len(episodes), generator=generator).tolist()
    batches, size = [[]], 0
    for i in order:
        if size >= steps:
            batches.append([])
            size = 0
        batches[-1].append(episodes[i])
        size += len(episodes[i][0].turns)
    if len(batches) > 1 and size < steps / 2:
        rest = batches.pop()  # (not `batches[-2] += batches.pop()`: the index is evaluated again after the pop)
        batches[-1] += rest
    return batches


def micro_batches(pairs: list, tokens: int) -> list[list]:
    """Cut a minibatch, sorted by length, into pieces of at most `tokens` padded tokens (at least one episode)."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0].ids))
    pieces: list[list] = [[]]
    for pair in pairs:
        if pieces[-1] and len(pair[0].ids) * (len(pieces[-1]) + 1) > tokens:
            pieces.append([])
        pieces[-1].append(pair)
    return pieces


def forward(policy: Policy, pairs: list) -> dict[str, torch.Tensor]:
    """The per-token quantities of a micro-batch: (N,) tensors over its sampled tokens, row by row."""
    device = policy.device
    episodes = [episode for episode, _ in pairs]
    mask = pad([e.mask for e in episodes], False, torch.bool, device)
    temps = pad([e.temps for e in episodes], 1.0, torch.float32, device)
    logps, entropy = token_logprobs(
        policy.model, pad([e.ids for e in episodes], 0, torch.long, device), mask, temps, entropy=True
    )
    return {
        "logps": logps,
        "entropy": entropy,
        "old": pad([e.logprobs for e in episodes], 0.0, torch.float32, device)[mask],
        "hot": pad([e.segments for e in episodes], 0, torch.long, device)[mask] == STRATEGY,
        "advantage": torch.tensor([a for _, a in pairs], device=device)[:, None].expand_as(mask)[mask],
    }


def update(policy: Policy, optimizer, episodes: list[Episode], how: UpdateSettings, generator: torch.Generator) -> dict:
    """One GRPO update: drop groups without signal, then `epochs` passes of minibatch steps.

    Returns the metrics of the update.  Raises FloatingPointError if the very first minibatch's ratio is not
    1 within `ratio_tolerance`: then sampling and training disagree, and nothing that follows can be trusted.
    """
    if any(t == 0 for e in episodes for t, m in zip(e.temps, e.mask, strict=True) if m):
        raise ValueError("episodes sampled at temperature 0 cannot be trained on: their log-probs have no gradient")
    keys = [advantage_key(e, how.advantage_groups) for e in episodes]
    advantages = group_advantages([e.reward for e in episodes], keys)
    informative = {key for key, a in zip(keys, advantages, strict=True) if a != 0}  # groups are kept or dropped whole
    pairs = [(e, a) for e, a, key in zip(episodes, advantages, keys, strict=True) if key in informative]
    metrics = {"kept": len(pairs) / max(1, len(episodes)), "skipped_steps": 0, "optimizer_steps": 0}
    sums: dict[str, float] = defaultdict(float)
    for epoch in range(how.epochs if pairs else 0):
        for batch in minibatches(pairs, how.minibatch_steps, generator):
            total = sum(sum(e.mask) for e, _ in batch)  # ONE token count, however the minibatch is cut up
            first = metrics["optimizer_steps"] + metrics["skipped_steps"] == 0
            for piece in micro_batches(batch, how.micro_tokens):
                tokens = forward(policy, piece)
                losses, clipped = clipped_loss(tokens["logps"], tokens["old"], tokens["advantage"], how.clip)
                (losses.sum() / total).backward()
                with torch.no_grad():
                    _count(sums, tokens, losses, clipped, first, epoch)
            if first:
                metrics |= _first_ratio(sums, policy, optimizer, how)
            norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), how.max_grad_norm)
            if torch.isfinite(norm):
                sums["grad_norm"] += norm.item()
                optimizer.step()
                metrics["optimizer_steps"] += 1
            else:  # a step with such a gradient would poison weights and moments for good
                metrics["skipped_steps"] += 1
                print(f"skipped an optimiser step: gradient norm {norm.item()}", flush=True)
            optimizer.zero_grad(set_to_none=True)
    return metrics | _means(sums, metrics)


def _count(sums: dict, tokens: dict, losses, clipped, first: bool, epoch: int) -> None:
    """Add a micro-batch to the running sums.  `first`: it belongs to the very first minibatch."""
    sums["tokens"] += len(losses)
    sums["loss"] += losses.sum().item()
    sums["clipped"] += clipped.sum().item()
    for name, where in (("strategy", tokens["hot"]), ("action", ~tokens["hot"])):
        if epoch == 0:  # entropy of the policy that is being left
            sums[f"{name}_tokens"] += where.sum().item()
            sums[f"{name}_entropy"] += tokens["entropy"][where].sum().item()
        if first and where.any():
            off = ((tokens["logps"] - tokens["old"])[where].exp() - 1).abs().nan_to_num(nan=float("inf")).max().item()
            sums[f"{name}_ratio_off"] = max(sums[f"{name}_ratio_off"], off)


def _first_ratio(sums: dict, policy: Policy, optimizer, how: UpdateSettings) -> dict:
    off = {f"first_ratio_off_{name}": sums[f"{name}_ratio_off"] for name in ("strategy", "action")}
    if policy.model.dtype == torch.float32 and max(off.values()) > how.ratio_tolerance:
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(
            f"the first minibatch's ratio is off by {max(off.values()):.1e} (allowed {how.ratio_tolerance:.0e}): log-probs "
            "in training are not those of sampling"
        )
    return off


def _means(sums: dict, metrics: dict) -> dict:
    tokens = max(1.0, sums["tokens"])
    return {
        "loss": sums["loss"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "grad_norm": sums["grad_norm"] / max(1, metrics["optimizer_steps"]),
        "strategy_entropy": sums["strategy_entropy"] / max(1.0, sums["strategy_tokens"]),
        "action_entropy": sums["action_entropy"] / max(1.0, sums["action_tokens"]),
    }
