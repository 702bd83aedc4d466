"""The sampler: batched, KV-cached decoding of many multi-turn episodes, with a temperature per token.

This is lines 5-10 of the paper's Algorithm 1: roll the policy out in the environments, strategies hot and
everything else cool (mixed-temperature sampling, SGE 3.2).  It runs over stock Hugging Face models, and
does what `generate()` does not:

  1. A temperature per token, decided by the text: a row is hot until its closing delimiter is complete.
  2. A cache without padding.  Every row has its own length; new keys and values go to the row's own next
     slots (`RaggedCache`).  So rows may differ in everything and still be stepped together.
  3. Each distinct prompt is read once; the rows of a group copy its keys and values.
  4. The cache is kept across turns: an observation costs its own tokens, not the conversation's.
  5. Rows that wait or have ended leave the batch; an episode's world is stepped as soon as its row is
     done; when there are more episodes than rows, a new episode takes the place of an ended one.

No top-p, no top-k, no penalties: the log-probs stored here are those of the distribution that was sampled
from, and training must find the same ones again (ratio 1 on the first minibatch).

How the paper's open points are settled (SGE 3.2 does not say):
  - The opening header is part of the prompt.  The tokens of the closing delimiter are hot, since they were
    sampled before the switch was known; the next token is the first cool one.
  - A strategy that does not end within `strategy_tokens` is cut off by temperature only: the row turns
    cool and goes on; if no action follows, the world answers that this was none.
  - At temperature 0 the likeliest token is taken and its log-prob is recorded as 0 (it was certain); such
    episodes are for evaluation, training refuses them.

Randomness: all rows draw from one generator.  Same jobs, same rows, same seed, same machine: same episodes.
"""

import math
import time
from dataclasses import dataclass, field

import torch

import envs
from policy import Policy
from reflection import PLAIN, Reflection

STRATEGY, ACTION = 1, 2  # values of Episode.segments on sampled tokens; 0 elsewhere

# ------------------------------------------------------------------------------------------------------
# what goes in and what comes out
# ------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One episode to be rolled out.  `group` tells which episodes share a baseline (one draw of a task)."""

    task: envs.Task
    reflection: Reflection = PLAIN
    group: int = 0


@dataclass
class Turn:
    """What a person would read of one environment step."""

    observation: str  # what the agent saw
    strategy: str
    action: str
    finish: str  # "stop": the reply ended itself; "length": it was cut off


@dataclass
class Episode:
    """The record that travels through the whole program.  The five lists have one entry per token."""

    task: envs.Task
    reflection: Reflection
    group: int
    ids: list[int] = field(default_factory=list)  # prompt, reply, observation, reply, ... in order
    mask: list[bool] = field(default_factory=list)  # True exactly on the tokens the policy sampled
    logprobs: list[float] = field(default_factory=list)  # at the temperature they were drawn with; else 0
    temps: list[float] = field(default_factory=list)  # that temperature; 1 where nothing was sampled
    segments: list[int] = field(default_factory=list)  # STRATEGY, ACTION, or 0
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    outcome: object = None  # the world's key for what happened
    feedback: str = ""  # the world's words on what went wrong
    finish: str = ""  # "success", "failure" (step limit or a lost end) or "context" (out of room)

    @property
    def strategies(self) -> list[str]:
        return [turn.strategy for turn in self.turns]

    def extend(self, ids: list[int], mask: bool, logprobs=None, temps=None, segments=None) -> None:
        """Append tokens to all five lists at once, so that they can never get out of step."""
        n = len(ids)
        self.ids += ids
        self.mask += [mask] * n
        self.logprobs += logprobs if mask else [0.0] * n
        self.temps += temps if mask else [1.0] * n
        self.segments += segments if mask else [0] * n


@dataclass(frozen=True)
class Sampling:
    """How to sample.  Temperatures are Table 2's; the caps are per environment step."""

    strategy_temp: float = 1.2
    token_temp: float = 0.7
    strategy_tokens: int = 24  # after so many tokens a strategy turns cool
    reply_tokens: int = 48  # a reply's strategy, delimiter and action together (Table 2: "output tokens")
    rows: int = 256  # episodes decoded side by side
    cache_gb: float = 4.0  # room for keys and values; fewer rows are used if they would not fit


# ------------------------------------------------------------------------------------------------------
# the cache
# ------------------------------------------------------------------------------------------------------


class RaggedCache:
    """Keys and values of many rows, each with a length of its own.

    keys[l], values[l]: (rows, kv_heads, capacity, head_dim).  A model's attention layers call `update`, as
    they would on a Hugging Face cache; where to write and how far to read is set by `view` beforehand.
    Slots beyond a row's length hold leftovers; they are masked when read and overwritten when reached.
    """

    is_compileable = False

    def __init__(self, config, rows: int, capacity: int, dtype: torch.dtype, device):
        heads, dim = kv_shape(config)
        shape = (rows, heads, capacity, dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def view(self, start: int, stop: int, positions: torch.Tensor, filled: int) -> None:
        """The next forward pass is over rows start..stop: it writes token j of row i to slot positions[i, j]
        (rows, c) and attends to the first `filled` slots."""
        self.rows, self.filled = slice(start, stop), filled
        self.slots = positions[:, None, :, None]  # (n, 1, c, 1)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args, **kwargs):
        """Write (n, kv_heads, c, head_dim) and return all filled slots of these rows (Hugging Face's interface)."""
        k, v = self.keys[layer][self.rows], self.values[layer][self.rows]
        if (keys.shape[1], keys.shape[3]) != (k.shape[1], k.shape[3]) or values.shape != keys.shape:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not what the model's "
                             "configuration promised: this architecture is not supported")  # fmt: skip
        where = self.slots.expand(keys.shape)
        k.scatter_(2, where, keys)
        v.scatter_(2, where, values)
        return k[:, :, : self.filled], v[:, :, : self.filled]

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # asked for by models when positions are not given; here they always are

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots a row, keeping what is there."""
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                tensors[i] = new

    def copy_from(self, other: "RaggedCache", source: list[int], target: list[int], length: int) -> None:
        """Rows `target` get the first `length` slots of rows `source` of `other` (which may be self)."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for a, b in zip(mine, theirs, strict=True):
                a[target, :, :length] = b[source, :, :length]  # the right side is gathered before writing


def attention_mask(model, allowed: torch.Tensor) -> torch.Tensor:
    """A mask as the model's attention wants it: boolean for SDPA, additive for all other implementations
    (to which True would mean "add 1")."""
    if getattr(model.config, "_attn_implementation", "sdpa") == "sdpa":
        return allowed
    lowest = torch.finfo(model.dtype).min
    return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill(~allowed, lowest)


def kv_shape(config) -> tuple[int, int]:
    """(key/value heads, head dimension) of a model."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, dim


# ------------------------------------------------------------------------------------------------------
# sampling one token per row
# ------------------------------------------------------------------------------------------------------


def sample(logits: torch.Tensor, temps: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / T) with each row's own T; T = 0 takes the likeliest.

    logits (n, V), temps (n,).  Returns tokens (n,) long and their log-probs (n,) float32 at that T.
    One uniform number per row, looked up in the cumulative distribution: no V random numbers a row.
    """
    greedy = temps == 0
    logits = logits.float() / temps.masked_fill(greedy, 1.0).unsqueeze(-1)
    logps = torch.log_softmax(logits, dim=-1)
    cumulative = logps.exp().cumsum(-1, dtype=torch.float64)
    u = torch.rand(len(temps), 1, generator=generator, device=logits.device, dtype=torch.float64)
    # right=True: the first entry ABOVE u, so that a token of probability 0 is never drawn
    drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(-1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn.clamp_(max=logits.shape[-1] - 1))
    chosen = logps.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens, chosen.masked_fill(greedy, 0.0)


# ------------------------------------------------------------------------------------------------------
# rolling out
# ------------------------------------------------------------------------------------------------------

DECODING, WAITING, FREE = 0, 1, 2  # what a row of the cache is doing; rows are kept sorted in this order


class Row:
    """One running episode: its record, its world, and the tokens that the model has still to read."""

    def __init__(self, episode: Episode, env, observation: str, index: int):
        self.episode, self.env, self.observation, self.index = episode, env, observation, index
        self.state = WAITING
        self.pending: list[int] = []  # ids to be read before the next token can be sampled
        self.switch: int | None = None  # how many tokens of the current reply are hot, once known
        self.budget = 0  # tokens that the current reply may have


class Rollout:
    """The machine behind `rollout`.  One instance, one call of `run`.

    The rows of the cache are kept in three runs, [decoding | waiting | free], so that each forward pass
    works on a slice and nothing is gathered.  Waiting rows hold an observation (or a new prompt) that the
    model has not read; they are read together, by one pass, once they outnumber the decoding ones.
    """

    def __init__(self, policy: Policy, world: str, jobs: list[Job], how: Sampling, generator: torch.Generator, tick):
        self.policy, self.world, self.jobs, self.how, self.generator = policy, world, jobs, how, generator
        self.tick = tick  # called once per finished episode
        self.device, self.model = policy.device, policy.model
        self.rows: list[Row | None] = [None] * row_count(policy, how, len(jobs))
        n, device = len(self.rows), self.device
        self.length = torch.zeros(n, dtype=torch.long, device=device)  # filled slots of each row
        self.last = torch.zeros(n, dtype=torch.long, device=device)  # token to be fed next
        self.temp = torch.zeros(n, device=device)  # temperature of the next token
        self.hot = torch.zeros(n, dtype=torch.bool, device=device)
        self.count = torch.zeros(n, dtype=torch.long, device=device)  # tokens sampled of the current reply
        self.look_at = torch.zeros(n, dtype=torch.long, device=device)  # ... at which a cap is reached
        self.alive = torch.zeros(n, dtype=torch.bool, device=device)  # False: decodes junk until moved away
        self.tokens = torch.zeros(n, how.reply_tokens + 1, dtype=torch.long, device=device)  # current reply
        self.logps = torch.zeros(n, how.reply_tokens + 1, device=device)
        self.drawn_at = torch.ones(n, how.reply_tokens + 1, device=device)  # temperatures of the current reply
        self.per_row = ("length", "last", "temp", "hot", "count", "look_at", "alive", "tokens", "logps", "drawn_at")
        is_stop = torch.zeros(policy.vocab, dtype=torch.bool)
        is_stop[policy.stop_ids] = True
        self.may_switch = policy.could_complete((policy.form.closing,)).to(device)
        self.may_stop = (is_stop | policy.could_complete(policy.form.stop)).to(device)
        self.cache = RaggedCache(self.model.config, n, 128, self.model.dtype, device)
        self.longest = 0  # upper bound of every row's length, kept on the host: no device sync to know it
        self.prompts: dict[tuple, list] = {}  # prompt ids -> [cache, row in it, episodes still to start]
        self.next_job, self.decoding = 0, 0
        self.episodes: list[Episode | None] = [None] * len(jobs)
        self.seconds = {"model": 0.0, "worlds": 0.0}

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> list[Episode]:
        self._prepare_prompts()
        self._start_episodes()
        while any(self.rows):
            waiting = sum(row is not None and row.state == WAITING for row in self.rows)
            running = sum(row is not None and row.state == DECODING for row in self.rows)
            if waiting and waiting >= running:
                self._read_pending()
            elif running < 0.75 * self.decoding:
                self._arrange()
            else:
                self._decode_step()
            if self.next_job < len(self.jobs):
                self._start_episodes()
        return self.episodes

    def _decode_step(self) -> None:
        """Feed every decoding row its last token and sample the next one."""
        n = self.decoding
        hidden = self._forward(0, n, self.last[:n, None], self.length[:n, None])
        self.length[:n] += self.alive[:n]  # a dead row writes its junk to the same slot again
        self._sample(0, n, hidden[:, 0])

    def _read_pending(self) -> None:
        """Read what the waiting rows have pending, each its own length, in one pass; then sample."""
        self._arrange()
        start = self.decoding
        rows = [row for row in self.rows[start:] if row is not None]
        stop = start + len(rows)
        chunk = max(len(row.pending) for row in rows)
        ids = torch.zeros(len(rows), chunk, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.pending)] = torch.tensor(row.pending)
        sizes = torch.tensor([len(row.pending) for row in rows], device=self.device)
        positions = self.length[start:stop, None] + torch.arange(chunk, device=self.device)
        # short rows are filled up with junk, which lands beyond their length and is overwritten later
        hidden = self._forward(start, stop, ids.to(self.device), positions)
        hidden = hidden[torch.arange(len(rows), device=self.device), sizes - 1]  # (n, d) at the last real token
        self.length[start:stop] += sizes
        self.longest = int(self.length[:stop].max())
        self._begin_replies(start, rows)
        self._sample(start, stop, hidden)
        self.decoding = stop

    def _forward(self, start: int, stop: int, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states (n, c, d) of rows start..stop for ids (n, c) at positions (n, c)."""
        began = time.perf_counter()
        filled = self._make_room(ids.shape[1])
        limit = self.policy.context - 1  # junk of short rows may point beyond the model's last position
        self.cache.view(start, stop, positions, filled)
        slots = torch.arange(filled, device=self.device)
        # (n, 1, c, filled): each row's own past
        mask = attention_mask(self.model, slots[None, None, None, :] <= positions[:, None, :, None])
        hidden = self.model.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions.clamp(max=limit), cache=self.cache, use_cache=True
        ).last_hidden_state
        self.seconds["model"] += time.perf_counter() - began
        return hidden

    def _make_room(self, chunk: int) -> int:
        """See to it that every row has `chunk` free slots; returns how many slots a pass has to read."""
        filled = self.longest + chunk
        if filled > self.cache.capacity:
            self.cache.grow(max(2 * self.cache.capacity, filled))
        self.longest = filled
        return filled

    def _sample(self, start: int, stop: int, hidden: torch.Tensor) -> None:
        """Sample one token for rows start..stop and look after those whose reply may have turned or ended."""
        began = time.perf_counter()
        logits = self.model.get_output_embeddings()(hidden)
        self.seconds["model"] += time.perf_counter() - began
        here = slice(start, stop)
        tokens, logps = sample(logits, self.temp[here], self.generator)
        at = self.count[here, None]
        self.tokens[here].scatter_(1, at, tokens[:, None])
        self.logps[here].scatter_(1, at, logps[:, None])
        self.drawn_at[here].scatter_(1, at, self.temp[here, None])
        self.count[here] += self.alive[here]
        self.last[here] = tokens
        event = self.may_stop[tokens] | (self.may_switch[tokens] & self.hot[here]) | (self.count[here] >= self.look_at[here])
        # the one place where the host waits for the device: which rows need a look?
        rows = start + (event & self.alive[here]).nonzero().flatten()
        for r, n in zip(rows.tolist(), self.count[rows].tolist(), strict=True):
            self._look(r, n)

    def _look(self, r: int, n: int) -> None:
        """Decide, from the text of its n sampled tokens, whether row r turns cool or ends its reply."""
        row, policy, how = self.rows[r], self.policy, self.how
        ids = self.tokens[r, :n].tolist()
        if ids[-1] in policy.stop_ids:
            return self._end_reply(r, ids, "stop")
        text = policy.decode(ids)
        if any(stop in text for stop in policy.form.stop):
            return self._end_reply(r, ids, "stop")
        if n >= row.budget:
            return self._end_reply(r, ids, "length")
        if row.switch is None and (policy.form.closing in text or n >= how.strategy_tokens):
            row.switch = n
            self.hot[r] = False
            self.temp[r] = how.token_temp
            self.look_at[r] = row.budget

    # -- replies and turns -----------------------------------------------------------------------------

    def reply_budget(self, row: Row) -> int:
        """Tokens that the reply which begins now may have (the benchmark overrides this)."""
        return self.how.reply_tokens

    def _begin_replies(self, start: int, rows: list[Row]) -> None:
        """Set rows that have read their prompt or observation to the start of a hot strategy."""
        here = slice(start, start + len(rows))
        for row in rows:
            row.state, row.pending, row.switch = DECODING, [], None
            row.budget = min(self.reply_budget(row), self.policy.context - len(row.episode.ids))
        look_at = [min(row.budget, self.how.strategy_tokens) for row in rows]
        self.look_at[here] = torch.tensor(look_at, device=self.device)
        self.temp[here] = self.how.strategy_temp
        self.hot[here] = self.alive[here] = True
        self.count[here] = 0

    def _end_reply(self, r: int, ids: list[int], finish: str) -> None:
        """Record the reply of row r, step its world, and queue what the world answers."""
        row, n = self.rows[r], len(ids)
        episode, switch = row.episode, n if row.switch is None else row.switch
        segments = [STRATEGY] * switch + [ACTION] * (n - switch)
        logprobs = self.logps[r, :n].tolist()
        if any(math.isnan(logprob) for logprob in logprobs):
            raise FloatingPointError("the model's logits are not numbers: its weights are broken")
        episode.extend(ids, True, logprobs, self.drawn_at[r, :n].tolist(), segments)
        strategy, action = self.policy.parse(self.policy.decode(ids))
        episode.turns.append(Turn(row.observation, strategy, action, finish))
        self.alive[r] = False
        began = time.perf_counter()
        row.observation, reward, terminated, truncated, info = row.env.step(action)
        self.seconds["worlds"] += time.perf_counter() - began
        episode.outcome, episode.feedback = info["outcome"], info["feedback"]
        if terminated or truncated:
            episode.reward = reward
            return self._end_episode(row, "success" if reward > 0 else "failure")
        glue = self.policy.turn_ids(row.observation, ids[-1])
        if len(episode.ids) + len(glue) >= self.policy.context:  # no room for even one more token
            return self._end_episode(row, "context")
        # the reply's last token was sampled but never fed to the model: it is the first to be read
        row.pending, row.state = [ids[-1]] + glue, WAITING
        episode.extend(glue, False)

    def _end_episode(self, row: Row, finish: str) -> None:
        row.episode.finish, row.state = finish, FREE
        self.episodes[row.index] = row.episode
        self.rows[self.rows.index(row)] = None
        self.tick()

    # -- rows ------------------------------------------------------------------------------------------

    def _arrange(self) -> None:
        """Put the rows back into the order [decoding | waiting | free], moving as few as possible."""
        state = [FREE if row is None else row.state for row in self.rows]
        want = sorted(state)
        wrong = [i for i in range(len(state)) if state[i] != want[i]]
        movers = {s: [i for i in wrong if state[i] == s] for s in (DECODING, WAITING, FREE)}
        source = [movers[want[i]].pop() for i in wrong]
        if wrong:
            # keys and values of a free row need no move: nobody will read them
            kept = [(s, t) for s, t in zip(source, wrong, strict=True) if state[s] != FREE]
            self.cache.copy_from(self.cache, [s for s, _ in kept], [t for _, t in kept], self.longest)
            for name in self.per_row:
                tensor = getattr(self, name)
                tensor[wrong] = tensor[source]
            moved = [self.rows[s] for s in source]
            for target, row in zip(wrong, moved, strict=True):
                self.rows[target] = row
        self.decoding = want.count(DECODING)
        live = self.length[: len(state) - want.count(FREE)]
        self.longest = int(live.max()) if len(live) else 0

    def _prepare_prompts(self) -> None:
        """Reset every job's world once and count how many episodes begin with the same ids."""
        self.starts, known = [], {}
        for job in self.jobs:
            env = envs.make_env(self.world)
            observation, _ = env.reset(job.task)
            if (job.task, job.reflection) not in known:
                ids = self.policy.prompt_ids(self.world, job.task, observation, job.reflection)
                known[job.task, job.reflection] = tuple(ids)
            ids = known[job.task, job.reflection]
            if len(ids) >= self.policy.context and job.reflection is not PLAIN:
                print(f"{job.task.id}: the strategies to reflect on do not fit the context; a plain episode instead", flush=True)
                job.reflection = PLAIN
                ids = tuple(self.policy.prompt_ids(self.world, job.task, observation))
            if len(ids) >= self.policy.context:
                raise ValueError(f"the prompt of {job.task.id} has {len(ids)} tokens, the model's context {self.policy.context}")
            self.prompts.setdefault(ids, [None, 0, 0])[2] += 1
            self.starts.append((env, observation, ids))

    def _start_episodes(self) -> None:
        """Give every free row the next episode.  Distinct prompts that are new are read in one pass."""
        free = [i for i, row in enumerate(self.rows) if row is None]
        begin = list(range(self.next_job, min(self.next_job + len(free), len(self.jobs))))
        self._read_prompts({self.starts[j][2] for j in begin})
        for r, j in zip(free, begin, strict=False):
            job, (env, observation, ids) = self.jobs[j], self.starts[j]
            row = self.rows[r] = Row(Episode(job.task, job.reflection, job.group), env, observation, j)
            row.episode.extend(list(ids), False)
            # The group shares the keys and values of all but the prompt's last token; each row reads that
            # one itself and so gets the logits of its own first token.
            row.pending = [ids[-1]]
            prompt = self.prompts[ids]
            shared = len(ids) - 1
            self.longest = max(self.longest, shared)
            if shared > self.cache.capacity:
                self.cache.grow(max(2 * self.cache.capacity, shared))
            self.cache.copy_from(prompt[0], [prompt[1]], [r], shared)
            self.length[r], self.alive[r] = shared, False
            prompt[2] -= 1
            if not prompt[2]:
                del self.prompts[ids]  # its last episode has started
        self.next_job += len(begin)

    def _read_prompts(self, prompts: set[tuple]) -> None:
        """Compute keys and values of prompts that no row has had yet, longest together with longest."""
        new = sorted((ids for ids in prompts if self.prompts[ids][0] is None), key=len)
        while new:
            batch, new = new[-PROMPT_BATCH:], new[:-PROMPT_BATCH]
            longest = len(batch[-1])
            cache = RaggedCache(self.model.config, len(batch), longest, self.model.dtype, self.device)
            ids = torch.zeros(len(batch), longest, dtype=torch.long)
            for i, prompt in enumerate(batch):
                ids[i, : len(prompt)] = torch.tensor(prompt)
                self.prompts[prompt][:2] = [cache, i]
            began = time.perf_counter()
            positions = torch.arange(longest, device=self.device).expand(len(batch), -1)
            cache.view(0, len(batch), positions, longest)
            # plain causal: short prompts end in junk, which comes after everything real
            mask = attention_mask(self.model, positions[0, None, :] <= positions[0, :, None])
            self.model.base_model(
                input_ids=ids.to(self.device), attention_mask=mask.expand(len(batch), 1, -1, -1),
                position_ids=positions, cache=cache, use_cache=True,
            )  # fmt: skip
            self.seconds["model"] += time.perf_counter() - began


PROMPT_BATCH = 64  # distinct prompts read in one pass


def row_count(policy: Policy, how: Sampling, episodes: int) -> int:
    """How many episodes to decode side by side, within `how.rows` and the cache's memory budget."""
    heads, dim = kv_shape(policy.model.config)
    token_bytes = 2 * policy.model.config.num_hidden_layers * heads * dim * policy.model.dtype.itemsize
    fit = int(how.cache_gb * 2**30 / (token_bytes * min(policy.context, 1024)))
    if fit < 1:
        raise ValueError(f"cache_gb={how.cache_gb} has no room for one row: it needs {token_bytes * 1024 / 2**30:.2f}")
    return max(1, min(how.rows, episodes, fit))


@torch.inference_mode()
def rollout(
    policy: Policy, world: str, jobs: list[Job], how: Sampling, generator: torch.Generator, tick=lambda: None
) -> list[Episode]:
    """Play every job to its end and return the episodes in the order of the jobs.

    generator: the random stream that sampling draws from (on the policy's device).
    tick: called once per finished episode, for progress bars.
    The model is in eval mode meanwhile (dropout must not differ between sampling and training) and is
    given back in the mode it was in, also after an error.
    """
    if not jobs:
        return []
    was_training = policy.model.training
    policy.model.eval()
    try:
        return Rollout(policy, world, jobs, how, generator, tick).run()
    finally:
        policy.model.train(was_training)
