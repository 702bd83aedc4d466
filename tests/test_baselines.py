"""The update's options and the paper's baselines: hand-computed values, and what each must never do.

Vectors are those of the paper's formulas; episodes are made by hand (helpers and fixtures of test_grpo.py)."""
# ruff: noqa: F811, I001  (fixtures are imported)

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import eval as evaluation
import grpo
import policy
import train
from fixtures import Table
from grpo import RND, clipped_loss, group_advantages, loss_weights
from policy import load_policy
from reflection import BARE, FORMATS, PLAIN, instruction, parse_reply
from sampler import ACTION, Turn
from test_grpo import (
    LOOSE, adamw, batch, episode, gradients, pi, qwen, relogged, rows, run, same, tokenizer, weights,  # noqa: F401
)  # fmt: skip

# -- advantages and filters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "std, wins, total, high, low",
    [
        ("biased", 1, 16, 3.872967, -0.258198), ("biased", 4, 8, 0.999998, -0.999998),
        ("none", 1, 16, 0.9375, -0.0625), ("unbiased", 1, 16, 3.749985, -0.249999),
    ],
)  # fmt: skip
def test_advantages_with_each_std(std, wins, total, high, low):
    """paper.md 9: biased std, and Dr. GRPO's none.  (The biased value for one of 16 is that of epsilon 0.)"""
    got = group_advantages([1] * wins + [0] * (total - wins), ["g"] * total, std)
    assert got == pytest.approx([high] * wins + [low] * (total - wins), abs=2e-5)


@pytest.mark.parametrize("std", ["unbiased", "biased", "none"])
def test_equal_groups_have_no_advantage_whatever_the_std(std):
    """E42, E50."""
    assert group_advantages([0.3, 0.1 + 0.2, 0.3, 7], ["a", "a", "a", "b"], std) == [0.0] * 4


def test_soft_overlong_punishment_by_hand(qwen):
    """E47, paper.md 9: DAPO eq. 13; the length is that of sampled tokens only."""
    got = [grpo.overlong_penalty(n, 100, 20) for n in (80, 81, 90, 100, 101)]
    assert got == pytest.approx([0, -0.05, -0.5, -1, -1])
    short, long = (episode(qwen, random.Random(0), 0, 1.0, ((2, 0),) * n) for n in (1, 4))
    lost = episode(qwen, random.Random(0), 0, 0.0, ((2, 0),))
    pairs = grpo.select([short, long, lost], replace(LOOSE, overlong_max=10, overlong_cache=4))
    shaped = [1.0, 1.0 - 0.5, 0.0]  # 2, 8 and 2 sampled tokens among many more
    assert [a for _, a in pairs] == pytest.approx(group_advantages(shaped, [0] * 3))


def test_the_filter_looks_at_raw_rewards_not_at_shaped_ones(qwen):
    """E46: a length bonus makes rewards unequal in groups without any signal."""
    rng = random.Random(0)
    episodes = [episode(qwen, rng, g, r, ((2, 0),) * n)
                for g, of_group in enumerate(([1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]))
                for n, r in enumerate(map(float, of_group), start=1)]  # fmt: skip
    pairs = grpo.select(episodes, replace(LOOSE, overlong_max=8, overlong_cache=6))
    assert [e.group for e, _ in pairs] == [0] * 4


def test_the_positive_ratio_band_drops_whole_groups(qwen):
    """Off by default; a group's share of successes must lie in the band, borders included."""
    groups = batch(qwen, ((1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0)))
    kept = {band: {e.group for e, _ in grpo.select(groups, replace(LOOSE, success_low=band[0], success_high=band[1]))}
            for band in ((0, 1), (0.25, 0.5), (0.3, 0.7), (0.8, 1))}  # fmt: skip
    assert list(kept.values()) == [{0, 1, 2}, {0, 1}, {1}, set()]


@pytest.mark.parametrize("how", ["none", "nan", "error"])
def test_unscorable_episodes_leave_no_trace_but_their_number(qwen, how):
    """An environment that failed is no failure of the agent: not in the baseline, the loss or the divisor."""
    good = batch(qwen, ((1, 0, 0),))
    lost = episode(qwen, random.Random(9), 0, {"none": None, "nan": float("nan"), "error": 0.0}[how])
    lost.finish = "error" if how == "error" else "failure"
    alone, with_it = gradients(qwen, good), gradients(qwen, [good[0], lost, *good[1:]])
    assert same(alone[0], with_it[0])
    assert with_it[1] == alone[1] | {"unscorable": 1} and alone[1]["unscorable"] == 0
    full = episode(qwen, random.Random(9), 0, 0.0)
    full.finish = "context"  # out of room: the agent's own failure
    assert not same(alone[0], gradients(qwen, [*good, full])[0])


def test_overlong_masking_takes_tokens_out_of_the_loss_but_not_out_of_the_baseline(qwen):
    """DAPO's overlong filtering: neither gradient nor divisor, whichever limit it was."""
    mask = replace(LOOSE, overlong_mask=True)
    for cut in ("context", "reply"):
        episodes = batch(qwen, ((1, 0, 0, 1),))
        if cut == "context":
            episodes[1].finish = "context"
        else:
            episodes[1].turns[0] = Turn("", "", "", "length")
        advantages = dict(zip(map(id, episodes), group_advantages([1, 0, 0, 1], [0] * 4), strict=True))
        pairs = grpo.select(episodes, mask)
        assert [id(e) for e, _ in pairs] == [id(e) for i, e in enumerate(episodes) if i != 1]
        assert all(a == advantages[id(e)] for e, a in pairs)
        assert same(gradients(qwen, episodes)[0], gradients(qwen, batch(qwen, ((1, 0, 0, 1),)))[0])  # default: off


# -- losses ----------------------------------------------------------------------------------------------


def test_clip_higher_by_hand():
    """E44: low .2, high .28; bounds or min/max swapped."""
    ratio = torch.tensor([1.25, 1.35, 0.7, 0.7, 1.5, 0.85])
    advantage = torch.tensor([1.0, 1, 1, -1, -1, -1])
    logps = ratio.log().requires_grad_()
    losses, clipped = clipped_loss(logps, torch.zeros(6), advantage, 0.2, 0.28)
    losses.sum().backward()
    assert (-losses).tolist() == pytest.approx([1.25, 1.28, 0.7, -0.8, -1.5, -0.85])
    assert clipped.tolist() == (logps.grad == 0).tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize(
    "norm, lengths, losses, want",
    [
        ("token", (2, 8), (1, 0), 0.2), ("sequence", (2, 8), (1, 0), 0.5), ("constant", (2, 8), (1, 0), 0.0625),
        ("token", (5, 1), (2, 10), 20 / 6), ("sequence", (5, 1), (2, 10), 6.0), ("token", (4, 1), (1, 5), 1.8),
    ],
)  # fmt: skip
def test_loss_norms_by_hand(norm, lengths, losses, want):
    """paper.md 9, E41, E40."""
    shares = loss_weights(list(lengths), norm, 16)
    assert sum(w * n * x for w, n, x in zip(shares, lengths, losses, strict=True)) == pytest.approx(want)


def test_k3_by_hand():
    """E45: argument order; never negative; 0 at equality; its gradient pulls towards the reference."""
    assert grpo.k3(torch.tensor(0.5).log(), torch.tensor(0.25).log()).item() == pytest.approx(0.1931, abs=1e-4)
    a, b = torch.randn(2, 100).unbind()
    assert (grpo.k3(a, b) >= 0).all() and (grpo.k3(a, a) == 0).all()
    logp = torch.tensor(-1.0, requires_grad=True)
    grpo.k3(logp, torch.tensor(-2.0)).backward()
    assert logp.grad > 0


def reference_loss(model, start, episodes, how):
    """The whole loss in float64, token by token, from full logits."""
    loss, count = 0.0, sum(sum(e.mask) for e in episodes)
    for e in episodes:
        mine = [x.reward for x in episodes if x.group == e.group]
        advantage = group_advantages(mine, [0] * len(mine))[[id(x) for x in episodes if x.group == e.group].index(id(e))]
        logits, first = (m(input_ids=torch.tensor([e.ids])).logits[0] for m in (model, start))
        for t in (t for t in range(1, len(e.ids)) if e.mask[t]):
            logps = torch.log_softmax(logits[t - 1] / e.temps[t], -1)
            logp, ref = logps[e.ids[t]], torch.log_softmax(first[t - 1] / e.temps[t], -1)[e.ids[t]].detach()
            entropy = -(logps.exp() * logps).sum().item()
            a = advantage + min(how.entropy_alpha * entropy, abs(advantage) / how.entropy_kappa)
            rho = (logp - e.logprobs[t]).exp()
            token = -torch.minimum(rho * a, rho.clamp(1 - how.clip, 1 + (how.clip_high or how.clip)) * a)
            token = token + how.kl * ((ref - logp).exp() - (ref - logp) - 1)
            share = {"token": 1 / count, "sequence": 1 / len(episodes) / sum(e.mask), "constant": 1 / len(episodes) / 16}
            loss = loss + share[how.loss_norm] * token
    return loss


@pytest.mark.parametrize(
    "options",
    [dict(loss_norm="sequence"), dict(loss_norm="constant", loss_constant=16), dict(clip_high=0.28),
     dict(kl=0.5), dict(kl=0.5, loss_norm="sequence"), dict(entropy_alpha=0.4)],
)  # fmt: skip
def test_gradients_with_each_option_are_those_of_the_formula(pi, options):
    """E41 (one normaliser for policy and KL terms), F52, F58 (KL at the token's own temperature); off-policy."""
    how = replace(LOOSE, **options)
    start = copy.deepcopy(pi.model)
    with torch.no_grad():
        for p in start.parameters():
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    episodes = batch(pi)
    noise = random.Random(0)
    for e in episodes:
        e.logprobs = [p + noise.uniform(-0.4, 0.4) * m for p, m in zip(e.logprobs, e.mask, strict=True)]
    exact = copy.deepcopy(pi.model).double()
    reference_loss(exact, copy.deepcopy(start).double(), episodes, how).backward()
    want = [p.grad for p in exact.parameters()]

    class Keep(torch.optim.SGD):
        def step(self):
            self.seen = [p.grad.clone() for p in pi.model.parameters()]

    keep = Keep(pi.model.parameters(), lr=0.0)
    metrics = grpo.update(pi, keep, episodes, how, torch.Generator().manual_seed(0), None, start)
    scale = max(g.abs().max() for g in want)
    for g, w in zip(keep.seen, want, strict=True):
        assert torch.allclose(g.double(), w, atol=2e-5 * scale, rtol=1e-4)
    assert ("kl" in metrics) == bool(how.kl) and ("entropy_bonus" in metrics) == bool(how.entropy_alpha)


# -- the forward pass ------------------------------------------------------------------------------------


def test_log_probs_entropy_and_gradient_against_float64():
    """F52, F57: values at mixed temperatures, and dlogp/dlogits = (onehot - p) / T."""
    g = torch.Generator().manual_seed(0)
    logits, targets = 3 * torch.randn(40, 11, generator=g), torch.randint(11, (40,), generator=g)
    temps, up = 0.5 + torch.rand(40, generator=g), torch.randn(40, generator=g)
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logps, entropy = grpo.ChosenLogprobs.apply(mine, targets, temps)
    (logps * up).sum().backward()
    whole = torch.log_softmax(exact / temps[:, None].double(), -1)
    chosen = whole.gather(-1, targets[:, None]).squeeze(-1)
    (chosen * up).sum().backward()
    assert torch.allclose(logps.double(), chosen, atol=1e-6) and not entropy.requires_grad
    assert torch.allclose(entropy.double(), -(whole.exp() * whole).sum(-1), atol=1e-6)
    assert torch.allclose(mine.grad.double(), exact.grad, atol=1e-6)


def test_tempered_log_probs_of_the_paper():
    """paper.md 9, F52: logits [2, 1, 0] at T = 1, .7, 1.2."""
    temps = torch.tensor([1.0, 0.7, 1.2]).repeat_interleave(3)
    logps, entropy = grpo.ChosenLogprobs.apply(torch.tensor([2.0, 1, 0]).expand(9, 3), torch.arange(3).repeat(3), temps)
    want = [-0.40761, -1.40761, -2.40761, -0.26012, -1.68869, -3.11726, -0.48457, -1.31790, -2.15123]
    assert logps.tolist() == pytest.approx(want, abs=2e-5)
    assert entropy[::3].tolist() == pytest.approx([0.83240, 0.65057, 0.90155], abs=2e-5)


def test_the_head_in_chunks_is_the_head_at_once(pi, monkeypatch):
    """F57: bounded memory changes nothing."""
    whole, metrics = gradients(pi, batch(pi))
    monkeypatch.setattr(grpo, "HEAD_NUMBERS", 1)
    monkeypatch.setattr(grpo, "HEAD_ROWS", 3)
    cut, cut_metrics = gradients(pi, batch(pi))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, cut, strict=True))
    assert metrics == pytest.approx(cut_metrics, abs=1e-5)


def test_the_head_sees_sampled_positions_only_and_a_chunk_at_a_time(qwen, monkeypatch):
    """F57: logits of prompt and padding; a tensor of (all tokens, vocabulary)."""
    monkeypatch.setattr(grpo, "HEAD_NUMBERS", 1)
    monkeypatch.setattr(grpo, "HEAD_ROWS", 7)
    episodes, seen = batch(qwen), []
    qwen.model.get_output_embeddings().register_forward_hook(lambda m, i, out: seen.append(len(out)))
    gradients(qwen, episodes)
    assert sum(seen) == sum(sum(e.mask) for e in episodes) and max(seen) == 7


def shared_batch(pi):
    """Two groups whose members begin with the same prompt, of different lengths in each group."""
    rng, made = random.Random(3), []
    for group, n in ((0, 12), (1, 20)):
        prompt = [rng.randrange(5, pi.vocab) for _ in range(n)]
        for i in range(4):
            e = episode(pi, rng, group, float(i % 2), ((3, 2), (2, 4), (4, 1))[: 1 + i % 3])
            tail = e.mask.index(True)
            for name, value in (("mask", False), ("logprobs", 0.0), ("temps", 1.0), ("segments", 0)):
                setattr(e, name, [value] * n + getattr(e, name)[tail:])
            made.append(relogged(pi, replace(e, ids=prompt + e.ids[tail:])))
    return made


@pytest.mark.parametrize("micro_tokens", [10**6, 25, 1])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_read_once_give_the_gradients_of_prompts_read_by_every_row(pi, monkeypatch, micro_tokens, attention):
    """Shared prompts of unequal lengths, any number of pieces and bundles; log-probs, too (ratio 1)."""
    pi.model.set_attn_implementation(attention)
    how, episodes, read = replace(LOOSE, micro_tokens=micro_tokens), shared_batch(pi), []
    real = grpo.SharedPrompts.__init__
    monkeypatch.setattr(grpo.SharedPrompts, "__init__", lambda self, *a: (real(self, *a), read.append(len(self.number)))[0])
    monkeypatch.setattr(grpo, "SHARING_PAYS", 2)
    apart, metrics = gradients(pi, episodes, how)
    assert not read
    monkeypatch.setattr(grpo, "SHARING_PAYS", 0)
    together, shared_metrics = gradients(pi, episodes, how)
    assert sum(read) == 2 and len(read) == (1 if micro_tokens > 100 else 2)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(apart, together, strict=True))
    assert metrics == pytest.approx(shared_metrics, abs=2e-5) and shared_metrics["first_ratio_off_strategy"] < 1e-5
    assert pi.model.config._attn_implementation == attention  # put back


def test_gradient_checkpointing_changes_no_gradient_and_turns_no_dropout_on(tokenizer):
    """F53: layers checkpoint in training mode only; GPT-2 has dropout."""
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=128, initializer_range=0.3)
    torch.manual_seed(0)
    gpt2 = policy.Policy(GPT2LMHeadModel(config).eval(), tokenizer, brief=True)
    episodes = batch(gpt2)
    plain, _ = gradients(gpt2, episodes)
    calls, block = [], gpt2.model.transformer.h[0].ln_1
    block.register_forward_hook(lambda *a: calls.append(torch.is_grad_enabled()))
    got, metrics = gradients(gpt2, episodes, replace(LOOSE, checkpointing=True))
    assert len(calls) == 2 and metrics["first_ratio_off_action"] < 1e-5  # once forward, once again backward
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, got, strict=True))
    gradients(gpt2, episodes)
    assert len(calls) == 3 and not any(m.training for m in gpt2.model.modules())


def test_checkpointing_of_an_unknown_model_is_refused_in_one_line(qwen):
    with pytest.raises(ValueError, match="checkpointing"):
        grpo.set_checkpointing(Table(torch.zeros(3, 3)), True)


# -- EntropyAdv ------------------------------------------------------------------------------------------


def test_entropy_advantages_by_hand():
    """paper.md 9 (alpha .4, kappa 2)."""
    cases = [(1, 0.5, 1.2), (1, 2, 1.5), (-1, 0.5, -0.8), (-1, 2, -0.5), (0, 3, 0), (3.75, 1, 4.15), (-0.25, 1, -0.125)]
    a, h, want = (torch.tensor(column, dtype=torch.float32) for column in zip(*cases, strict=True))
    assert (a + grpo.entropy_bonus(a, h)).tolist() == pytest.approx(want.tolist())


def test_entropy_advantages_never_flip_a_sign_and_carry_no_gradient():
    a, h = torch.randn(1000), (10 * torch.rand(1000)).requires_grad_()
    shaped = a + grpo.entropy_bonus(a, h)
    assert not shaped.requires_grad and (shaped.sign() == a.sign()).all() and (shaped >= a).all()


def test_an_all_equal_group_changes_no_weight_under_entropy_advantages(qwen):
    """paper.md 9."""
    before = weights(qwen)
    run(qwen, adamw(qwen), batch(qwen, ((0, 0, 0), (1, 1, 1))), replace(LOOSE, entropy_alpha=0.4))
    assert same(before, weights(qwen))


# -- RND -------------------------------------------------------------------------------------------------


def test_rnd_target_stays_and_predictor_learns_and_the_policy_gets_no_gradient():
    """paper.md 9: target parameters unchanged after training."""
    state = torch.get_rng_state()
    rnd = RND(6, hidden=16, seed=1)
    assert torch.equal(state, torch.get_rng_state())
    target, features = copy.deepcopy(rnd.target.state_dict()), torch.randn(50, 6, requires_grad=True)
    first = rnd.errors(features.detach()).mean().item()
    for _ in range(100):
        rnd.learn(features.detach())
    assert all(torch.equal(v, rnd.target.state_dict()[k]) for k, v in target.items())
    assert rnd.errors(features.detach()).mean().item() < 0.5 * first and features.grad is None


def test_rnd_scales_and_decay_by_hand():
    """paper.md 9: i-MENTOR, errors .1 .2 .3: 0, .25, .5 at step 0 and half of it at step 40; no division by 0."""
    errors = torch.tensor([0.1, 0.2, 0.3])
    bonus = grpo.rnd_scale(errors, "minmax", 0.0)
    assert bonus.tolist() == pytest.approx([0, 0.25, 0.5])
    assert [grpo.rnd_coefficient(1.0, 40, step) for step in (0, 40)] == [1.0, 0.5] and grpo.rnd_coefficient(1.0, 0, 99) == 1
    assert grpo.rnd_scale(errors, "std", 0.1).tolist() == pytest.approx([1, 2, 3])
    assert grpo.rnd_scale(torch.ones(3), "minmax", 0.0).tolist() == [0, 0, 0]
    rnd = RND(2)
    rnd.observe([1.0, 2.0])
    assert rnd.observe([6.0]) == pytest.approx(torch.tensor([1.0, 2, 6]).std().item())


def test_rnd_pays_each_step_of_failed_episodes_only(qwen):
    """SGE A.4: e / std(e) at the last token of each step, for zero-reward trajectories; the bonus precedes the learning."""
    episodes = batch(qwen, ((1, 0, 0),))
    made = rows((e, 0.5) for e in episodes)
    rnd = RND(32, seed=0)
    fresh = copy.deepcopy(rnd)
    how = replace(LOOSE, rnd_coef=0.3, micro_tokens=1)
    metrics = grpo.novelty(qwen.model, made, rnd, how)
    assert (made[0].advantage == 0.5).all() and rnd.updates == 1
    errors = []
    for e in episodes[1:]:
        with torch.no_grad():
            hidden = qwen.model.base_model(input_ids=torch.tensor([e.ids])).last_hidden_state[0]
            ends = [t for t in range(len(e.ids)) if e.mask[t] and not (e.mask + [False])[t + 1]]
            errors.append(fresh.errors(hidden[ends]))
    std = torch.cat(errors).std()
    for row, e, of_row in zip(made[1:], episodes[1:], errors, strict=True):
        assert len(of_row) == len(e.turns)
        reply = torch.tensor([sum(not m for m in e.mask[5:t]) // 3 for t in row.at.tolist()])  # observations before it
        torch.testing.assert_close(row.advantage, 0.5 + 0.3 * (of_row / std)[reply], atol=1e-4, rtol=1e-4)
    assert metrics["rnd_error"] == pytest.approx(torch.cat(errors).mean().item(), rel=1e-4)


@pytest.mark.parametrize("which, kept", [("mixed", 0), ("all", 1)])
def test_rnd_in_groups_without_a_success(qwen, which, kept):
    """paper.md 4.2: dynamic sampling before the bonus, or not."""
    how = replace(LOOSE, rnd_groups=which)
    before = weights(qwen)
    metrics = grpo.update(qwen, adamw(qwen), batch(qwen, ((0, 0, 0),)), how, torch.Generator().manual_seed(0), RND(32))
    assert metrics["kept"] == kept and same(before, weights(qwen)) == (not kept)
    assert ("rnd_error" in metrics) == ("rnd_bonus" in metrics) == bool(kept)  # no 0 where nothing was measured


# -- RLAD ------------------------------------------------------------------------------------------------


def test_kl_is_0_at_the_start_and_grows(qwen):
    """paper.md 9; E51: groups without signal feel no KL either."""
    start, how = copy.deepcopy(qwen.model), replace(LOOSE, kl=0.1)
    first, second = (
        grpo.update(qwen, adamw(qwen), batch(qwen), how, torch.Generator().manual_seed(0), None, start) for _ in range(2)
    )
    assert first["kl"] < 1e-9 < 1e-4 < second["kl"]
    before = weights(qwen)
    grpo.update(qwen, adamw(qwen), batch(qwen, ((1, 1), (0, 0))), how, torch.Generator().manual_seed(0), None, start)
    assert same(before, weights(qwen))


def test_kl_pulls_back_to_the_start():
    """E45: reward 0, beta > 0, from a perturbed start: the exact KL to the reference falls (value right, gradient wrong)."""
    g = torch.Generator().manual_seed(0)
    reference = torch.log_softmax(torch.randn(8, generator=g), -1)
    theta = (reference + torch.randn(8, generator=g)).requires_grad_()

    def distance():
        now = torch.log_softmax(theta.detach(), -1)
        return (now.exp() * (now - reference)).sum().item()

    before = distance()
    for _ in range(50):
        drawn = torch.multinomial(torch.softmax(theta.detach(), -1), 64, replacement=True, generator=g)
        logps, entropy = grpo.ChosenLogprobs.apply(theta.expand(64, -1), drawn, torch.ones(64))
        tokens = {"advantage": torch.zeros(64), "old": logps.detach(), "reference": reference[drawn]}
        losses, _, extra = grpo.token_losses(tokens, logps, entropy, replace(LOOSE, kl=1.0))
        theta.grad = None
        losses.mean().backward()
        theta.data -= 0.5 * theta.grad
        assert (extra["kl"] >= 0).all()
    assert distance() < 0.1 * before


def test_episodes_without_strategy_may_have_no_advantage(qwen):
    """RLAD eq. 3: reward masked, KL kept."""
    rng = random.Random(0)
    episodes = [episode(qwen, rng, 0, r, mode=m) for m, r in (("plain", 1.0), ("bare", 0.0), ("plain", 0.0))]
    advantages = {how: [a for _, a in grpo.select(episodes, replace(LOOSE, skip_advantage=how))] for how in ("group", "zero")}
    assert advantages["zero"][1] == 0 and advantages["group"][1] < 0
    assert advantages["zero"][::2] == advantages["group"][::2]


# -- in the training loop --------------------------------------------------------------------------------


def new_run(flags):
    config, _ = train.parse_flags(flags)
    return train.Run(config, load_policy(config.model, config.env))


@pytest.mark.parametrize("method", ["entropy", "rnd", "rlad"])
def test_a_baseline_is_grpo_and_one_thing_more(train_flags, coins, method):
    """SGE 4.2, A.4: one temperature, no reflection, the strategy prompt kept."""
    run = new_run(train_flags("run", method=method, tasks_per_update=4, group_size=6))
    metrics, episodes = run.one_update(lambda: None)
    assert {round(t, 6) for e in episodes for t, m in zip(e.temps, e.mask, strict=True) if m} == {0.7}
    named = {"entropy": "entropy_bonus", "rnd": "rnd_error", "rlad": "kl"}
    assert {n for n in named.values() if n in metrics} == {named[method]} and metrics["optimizer_steps"] > 0
    assert ("bare" in {e.reflection.mode for e in episodes}) == (method == "rlad")
    assert metrics["reflected"] == 0 and metrics["first_ratio_off_action"] < 1e-4


def test_rlad_skips_the_strategy_in_a_quarter_of_the_episodes(train_flags, coins):
    run = new_run(train_flags("run", method="rlad", tasks_per_update=16, group_size=8))
    episodes, _ = run.collect(lambda: None)
    bare = [e for e in episodes if e.reflection is BARE]
    assert 0.15 < len(bare) / len(episodes) < 0.35 and len(episodes) == 128
    for e in bare:
        prompt = run.policy.tokenizer.decode(e.ids[: e.mask.index(True)])
        assert "trategy" not in prompt and not any(e.strategies)
        assert set(e.segments) == {0, ACTION}
        reply = e.ids[e.mask.index(True) :][: (e.mask[e.mask.index(True) :] + [False]).index(False)]
        assert e.turns[0].action == run.policy.decode(reply).strip()  # all of it
    said = [turn.action for e in bare for turn in e.turns]  # (this model may end a reply before its first word)
    assert sum(map(bool, said)) > 0.8 * len(said)
    assert [e.group for e in episodes] == sorted(e.group for e in episodes)  # in the order of the jobs
    assert any("trategy" in run.policy.tokenizer.decode(e.ids) for e in episodes if e.reflection is PLAIN)


def test_the_strategy_prompt_can_be_left_out(train_flags, coins):
    """SGE 4.4 (GRPO without it): no instruction, no header; a reply is an action; evaluation likewise."""
    config, _ = train.parse_flags(train_flags("run", method="grpo", strategy_prompt="off"))
    assert config.strategy_format == "none"
    run = train.Run(config, load_policy(config.model, config.env, form=config.strategy_format))
    metrics, episodes = run.one_update(lambda: None)
    for e in episodes:
        assert "trategy" not in run.policy.tokenizer.decode(e.ids[: e.mask.index(True)]) and set(e.segments) == {0, ACTION}
    assert not run.buffers.entries and "strategy_entropy" not in metrics
    assert parse_reply("go bed\n", FORMATS["none"]) == ("", "go bed")
    assert "trategy" not in instruction(PLAIN, FORMATS["none"], brief=False)


def test_sge_without_the_strategy_prompt_is_refused(train_flags, capsys):
    with pytest.raises(SystemExit):
        train.parse_flags(train_flags("run", strategy_prompt="off"))
    assert "--strategy-prompt" in capsys.readouterr().err


@pytest.mark.parametrize("flag, value", [("success_low", 0.9), ("entropy_kappa", 1), ("kl", -1), ("skip_strategy", 1)])
def test_senseless_options_are_refused_in_one_line(train_flags, capsys, flag, value):
    flags = train_flags("run", **{flag: value, "success_high": 0.5})
    with pytest.raises(SystemExit):
        train.parse_flags(flags)
    assert "--" + flag.replace("_", "-") in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("refill, rounds", [(0, 1), (3, 4)])
def test_refill_ends_after_a_bounded_number_of_rounds(train_flags, coins, monkeypatch, refill, rounds):
    """E46: on tasks without any signal it would go on for ever."""
    monkeypatch.setattr(coins, "step", lambda self, action: lost(self))
    run = new_run(train_flags("run", refill=refill))
    metrics, episodes = run.one_update(lambda: None)
    assert metrics["rounds"] == rounds and metrics["kept"] == 0 and len(episodes) == 8 * rounds
    assert len({e.group for e in episodes}) == 2 * rounds


def lost(world):
    return "", 0.0, False, True, {"outcome": 0, "feedback": ""}


def test_refill_draws_as_many_tasks_as_groups_are_missing(train_flags, coins):
    run = new_run(train_flags("run", refill=20, tasks_per_update=4, group_size=2))
    episodes, rounds = run.collect(lambda: None)
    rewards = {}
    for e in episodes:
        rewards.setdefault(e.group, []).append(e.reward)
    useful = [g for g, r in rewards.items() if len(set(r)) > 1]
    assert rounds > 1 and len(useful) == 4 and all(len(r) == 2 for r in rewards.values())


def test_an_update_with_unscorable_episodes(train_flags, coins, monkeypatch):
    """They are in no rate and in no buffer, but are counted, and a transcript of them is JSON."""
    run, real = new_run(train_flags("run", tasks_per_update=3)), train.rollout

    def broken(*args):
        episodes = real(*args)
        for e in episodes[:5]:
            e.reward, e.finish = None, "error"
        return episodes

    monkeypatch.setattr(train, "rollout", broken)
    monkeypatch.setattr(evaluation, "rollout", broken)
    counts = evaluation.count_successes(run.policy, "house", run.tasks[:2], 5, run.config.plain_sampling, 0)
    assert counts[0]["tries"] == 5 and counts[0]["successes"] == 0  # all five of the first task
    metrics, episodes = run.one_update(lambda: None)
    assert metrics["unscorable"] == 5 and metrics["episodes"] == 7
    assert metrics["success_plain"] == sum(e.reward for e in episodes[5:]) / 7
    assert sum(len(fifo) for fifo in run.buffers.entries.values()) <= 7
    assert train.transcript(episodes[0], 1)["reward"] is None


@pytest.mark.parametrize("method", ["rnd", "rlad"])
def test_a_resumed_baseline_is_the_uninterrupted_one(train_flags, coins, tmp_path, method):
    """G59, G60: the networks of RND are part of the state; RLAD's reference is the start, not the checkpoint."""
    flags = train_flags("run", method=method)
    (tmp_path / "run").mkdir()
    run = new_run(flags)
    run.one_update(lambda: None)
    run.save()
    want = run.one_update(lambda: None)[0]
    config, _ = train.parse_flags(flags)
    again = train.Run(config, load_policy(str(tmp_path / "run"), config.env))
    again.load()
    got = again.one_update(lambda: None)[0]
    assert {k: v for k, v in got.items() if "seconds" not in k} == {k: v for k, v in want.items() if "seconds" not in k}
    assert got["kl" if method == "rlad" else "rnd_error"] > 0
