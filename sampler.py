"""The sampler: batched, KV-cached decoding of many multi-turn episodes, with a temperature per token.

This is lines 5-10 of the paper's Algorithm 1: roll the policy out in the environments, strategies hot and
everything else cool (mixed-temperature sampling, SGE 3.2).  It runs over stock Hugging Face models, and
does what `generate()` does not:

  1. A temperature per token, decided by the text: a row is hot until its closing delimiter is complete.
  2. A cache without padding.  Every row has its own length; new keys and values go to the row's own next
     slots (`RaggedCache`).
  3. A batch without padding.  A forward pass is ONE packed sequence: a token of every row, and in front of
     some of them the observation that the row has to read (`Pass`).  No row ever waits for another.
  4. Each distinct prompt is read once; the rows of a group copy its keys and values.
  5. The cache is kept across turns: an observation costs its own tokens, not the conversation's.
  6. Rows that have ended leave the batch; an episode's world is stepped as soon as its reply is complete;
     when there are more episodes than rows, a new episode takes the place of an ended one.

How a stock model is made to do that: its attention layers hand new keys and values to whatever cache they
are given, and take their attention function from a table by name.  All else in a decoder works token by
token and does not care which row a token belongs to.

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
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface

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
    reply_tokens: int = 64  # a reply's strategy, delimiter and action together (Table 2: "output tokens")
    rows: int = 256  # episodes decoded side by side
    cache_gb: float = 4.0  # room for keys and values; fewer rows are used if they would not fit
    compile: bool = False  # torch.compile the decode step, which then has few different shapes


# ------------------------------------------------------------------------------------------------------
# the cache, and attention over it
# ------------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """The tokens of one forward pass, packed into one sequence of T = n + R:

        n decoding tokens   token i belongs to cache row i: the newest token of every running row
        R reading tokens    stretches of some rows: a prompt, or what comes before a row's newest token

    Keys and values of all T are written before any token attends, and a token attends to the slots of its
    row up to its own: so a row may read an observation and decode its first reply token in one pass.
    """

    row: torch.Tensor  # (T,) cache row of each token
    slot: torch.Tensor  # (T,) its slot in that row = its position in the conversation
    n: int  # decoding tokens
    filled: int  # slots that anybody attends to: the first `filled`
    bias: torch.Tensor  # (n, 1, 1, filled) 0 where decoding token i may look, else -inf
    readers: torch.Tensor | None = None  # (m,) cache rows that read
    unpack: torch.Tensor | None = None  # (m, c) where in the sequence a reader's tokens are, short ones filled up with 0
    pack: torch.Tensor | None = None  # (R,) the way back: index into the flattened (m, c)
    sees: torch.Tensor | None = None  # (m, 1, c, filled) True where a reading token may look


def plan(newest: torch.Tensor, reading: list[tuple[int, int, int]], filled: int, dtype: torch.dtype) -> Pass:
    """Lay out a forward pass.

    newest (n,): slots of the decoding tokens of cache rows 0..n-1.
    reading: (cache row, first slot, how many tokens) of the rows that read, in the order of their tokens.
    """
    device, n = newest.device, len(newest)
    slots = torch.arange(filled, device=device)
    hidden = slots[None, :] > newest[:, None]  # (n, filled)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)[:, None, None]
    row = torch.arange(n, device=device)
    if not reading:
        return Pass(row, newest, n, filled, bias)
    readers, first, counts = torch.tensor(reading).unbind(1)  # built on the host and sent over in a few pieces
    grid = torch.arange(int(counts.max()))
    starts, counts, first = (n + counts.cumsum(0) - counts)[:, None], counts[:, None], first[:, None]
    real = grid < counts  # (m, c)
    unpack, places = torch.where(real, starts + grid, 0), first + grid
    pack = real.flatten().nonzero().flatten()
    row = torch.cat([row, readers[:, None].expand_as(real)[real].to(device)])
    slot = torch.cat([newest, places[real].to(device)])
    sees = slots[None, None, None, :] <= places.to(device)[:, None, :, None]
    return Pass(row, slot, n, filled, bias, readers.to(device), unpack.to(device), pack.to(device), sees)


class RaggedCache:
    """Keys and values of many rows, each with a length of its own.

    keys[l], values[l]: (rows, kv_heads, capacity, head_dim).  A model's attention layers call `update`, as
    they would on a Hugging Face cache; where to write is said by `at`, the pass under way.
    Slots beyond a row's length hold leftovers; they are never attended to, and overwritten when reached.
    """

    is_compileable = False
    at: Pass

    def __init__(self, config, rows: int, capacity: int, dtype: torch.dtype, device):
        heads, dim = kv_shape(config)
        shape = (rows, heads, capacity, dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args, **kwargs):
        """Write the pass's keys and values (1, kv_heads, T, head_dim); return all rows' (Hugging Face's interface)."""
        k, v = self.keys[layer], self.values[layer]
        expected = (1, k.shape[1], len(self.at.slot), k.shape[3])
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not what the model's "
                             "configuration promised: this architecture is not supported")  # fmt: skip
        k[self.at.row, :, self.at.slot] = keys[0].transpose(0, 1)  # (T, kv_heads, head_dim)
        v[self.at.row, :, self.at.slot] = values[0].transpose(0, 1)
        return k, v

    def get_seq_length(self, layer: int = 0) -> int:
        return 0  # asked for by models when positions are not given; here they always are

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots a row, keeping what is there."""
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                new[:, :, : old.shape[2]] = old
                tensors[i] = new

    def copy_from(self, other: "RaggedCache", source: int, target: int, length: int) -> None:
        """Row `target` gets the first `length` slots of row `source` of `other` (which may be self)."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for a, b in zip(mine, theirs, strict=True):
                a[target, :, :length] = b[source, :, :length]


def ragged_attention(module, query, key, value, attention_mask, scaling=None, ragged: Pass | None = None, **kwargs):
    """Attention of a packed sequence over the cache, under the name "ragged" in Hugging Face's table.

    query (1, heads, T, d); key, value (rows, kv_heads, capacity, d).  Returns ((1, T, heads, d), None).
    """
    p, (heads, d), kv_heads = ragged, query.shape[1::2], key.shape[1]
    query, scale = query[0].transpose(0, 1), d**-0.5 if scaling is None else scaling  # (T, heads, d)
    # One token a row.  The query heads that share a key/value head stand in for several tokens of one head,
    # so no key or value is repeated.
    k, v = key[: p.n, :, : p.filled], value[: p.n, :, : p.filled]  # (n, kv_heads, filled, d)
    q = query[: p.n].reshape(p.n, kv_heads, heads // kv_heads, d)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, p.bias, scale=scale).reshape(p.n, heads, d)
    if p.readers is not None:  # few rows, many queries each: padded to the longest
        k, v = key[p.readers, :, : p.filled], value[p.readers, :, : p.filled]
        q = query[p.unpack].transpose(1, 2)  # (m, heads, c, d)
        read = torch.nn.functional.scaled_dot_product_attention(q, k, v, p.sees, scale=scale, enable_gqa=kv_heads < heads)
        out = torch.cat([out, read.transpose(1, 2).flatten(0, 1)[p.pack]])
    return out[None], None


AttentionInterface.register("ragged", ragged_attention)


def forward(body, cache: RaggedCache, ids: torch.Tensor, at: Pass) -> torch.Tensor:
    """Run `body` (a model without its head) over packed ids (T,).  Returns hidden states (T, d)."""
    cache.at = at
    out = body(input_ids=ids[None], position_ids=at.slot[None], cache=cache, use_cache=True, ragged=at)
    return out.last_hidden_state[0]


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


class Row:
    """One running episode: its record, its world, its row of the cache, and what the model has still to read."""

    def __init__(self, episode: Episode, env, observation: str, job: int, at: int):
        self.episode, self.env, self.observation = episode, env, observation
        self.job, self.at = job, at
        self.pending: list[int] = []  # ids at the end of episode.ids that are not in the cache yet
        self.began = 0  # the pass that sampled the current reply's first token
        self.switch: int | None = None  # how many tokens of the current reply are hot, once known
        self.budget = 0  # tokens that the current reply may have


class Rollout:
    """The machine behind `rollout`.  One instance, one call of `run`.

    self.rows[i] is the episode in row i of the cache and of the tensors below; there are no gaps.  Every
    pass feeds each row its newest token and samples the next one.  The host looks at those rows only whose
    new token may complete a delimiter, a stop or a cap; which rows these are is its one question to the
    device a pass.
    """

    def __init__(self, policy: Policy, world: str, jobs: list[Job], how: Sampling, generator: torch.Generator, tick):
        self.policy, self.world, self.jobs, self.how, self.generator = policy, world, jobs, how, generator
        self.tick = tick  # called once per finished episode
        self.device, self.model = policy.device, policy.model
        n, device = row_count(policy, how, len(jobs)), self.device
        self.newest = torch.zeros(n, dtype=torch.long, device=device)  # slot of the token to be fed next ...
        self.last = torch.zeros(n, dtype=torch.long, device=device)  # ... and that token
        self.temp = torch.zeros(n, device=device)  # temperature of the next token
        self.hot = torch.zeros(n, dtype=torch.bool, device=device)
        self.count = torch.zeros(n, dtype=torch.long, device=device)  # tokens sampled of the current reply
        self.look_at = torch.zeros(n, dtype=torch.long, device=device)  # ... at which a cap is reached
        self.tokens = torch.zeros(n, how.reply_tokens, dtype=torch.long, device=device)  # current reply
        self.logps = torch.zeros(n, how.reply_tokens, device=device)
        self.drawn_at = torch.ones(n, how.reply_tokens, device=device)  # temperatures of the current reply
        self.per_row = ("newest", "last", "temp", "hot", "count", "look_at", "tokens", "logps", "drawn_at")
        is_stop = torch.zeros(policy.vocab, dtype=torch.bool)
        is_stop[policy.stop_ids] = True
        self.may_switch = policy.could_complete((policy.form.closing,)).to(device)
        self.may_stop = (is_stop | policy.could_complete(policy.form.stop)).to(device)
        self.cache = RaggedCache(self.model.config, n, 128, self.model.dtype, device)
        self.body = self.model.base_model
        self.decode_body = torch.compile(self.body, dynamic=False) if how.compile else self.body
        self.rows: list[Row] = []  # the running episodes
        self.starting: list[Row] = []  # those whose next token is the first of a reply
        self.longest = 0  # slots in use of the longest row, known on the host: no question to the device
        self.passes = 0
        self.prompts: dict[tuple, list] = {}  # prompt ids -> [cache, row in it, episodes still to start]
        self.next_job = 0
        self.episodes: list[Episode | None] = [None] * len(jobs)
        self.seconds = {"model": 0.0, "worlds": 0.0}

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> list[Episode]:
        self._prepare_prompts()
        self._start_episodes(range(len(self.newest)))
        while self.rows:
            events = self._sample(self._feed())
            ended = [row for row in self._look(events) if row.episode.finish]
            if ended:
                self._leave(ended)
        return self.episodes

    def _feed(self) -> torch.Tensor:
        """Feed every row its newest token, after whatever it has still to read.  Returns hidden states (n, d)."""
        starting, self.starting = self.starting, []
        if starting:
            self._begin_replies(starting)
        self.passes += 1
        reading = [(row.at, len(row.episode.ids) - len(row.pending), len(row.pending) - 1) for row in starting]
        words = [i for row in starting for i in row.pending[:-1]]
        reading = [stretch for stretch in reading if stretch[2]]
        for row in starting:
            row.pending = []
        self._make_room()
        if self.how.compile and reading:  # the decode step keeps its shape: reading is a pass of its own
            self._forward(0, words, reading, self.body)
            words, reading = [], []
        n = len(self.rows)
        hidden = self._forward(n, words, reading, self.body if reading else self.decode_body)
        self.newest[:n] += 1
        self.longest += 1
        return hidden[:n]

    def _forward(self, n: int, words: list[int], reading: list[tuple[int, int, int]], body) -> torch.Tensor:
        """One pass: the newest tokens of rows 0..n-1 and the stretches `reading` of the ids `words`."""
        began = time.perf_counter()
        filled = self.longest
        if self.how.compile and n:  # few shapes: rows and slots in steps; surplus rows are free ones, and write junk there
            n, filled = min(-(-n // 16) * 16, len(self.newest)), min(-(-filled // 128) * 128, self.cache.capacity)
        at = plan(self.newest[:n], reading, filled, self.model.dtype)
        ids = torch.cat([self.last[:n], torch.tensor(words, device=self.device)]) if words else self.last[:n]
        hidden = forward(body, self.cache, ids, at)
        self.seconds["model"] += time.perf_counter() - began
        return hidden

    def _make_room(self) -> None:
        """See to it that the longest row's newest token has a slot, doubling the cache while that is within its budget."""
        if self.longest > self.cache.capacity:
            fit = slots_within(self.policy, self.how) // len(self.newest)
            self.cache.grow(max(self.longest, min(2 * self.cache.capacity, self.policy.context, fit)))

    def _sample(self, hidden: torch.Tensor) -> list[int]:
        """Sample one token per row.  Returns the rows whose reply may have turned or ended."""
        began = time.perf_counter()
        logits = self.model.get_output_embeddings()(hidden)
        self.seconds["model"] += time.perf_counter() - began
        here = slice(0, len(hidden))
        tokens, logps = sample(logits, self.temp[here], self.generator)
        at = self.count[here, None]
        self.tokens[here].scatter_(1, at, tokens[:, None])
        self.logps[here].scatter_(1, at, logps[:, None])
        self.drawn_at[here].scatter_(1, at, self.temp[here, None])
        self.count[here] += 1
        self.last[here] = tokens
        event = self.may_stop[tokens] | (self.may_switch[tokens] & self.hot[here]) | (self.count[here] >= self.look_at[here])
        return event.nonzero().flatten().tolist()  # here the host waits for the device

    # -- replies and turns -----------------------------------------------------------------------------

    def _look(self, events: list[int]) -> list[Row]:
        """Decide, from the text of their sampled tokens, which rows turn cool and which replies end; end those.
        Returns the rows whose reply ended."""
        replies, cooled, done = self.tokens[events].tolist() if events else [], [], []
        for r, ids in zip(events, replies, strict=True):
            row = self.rows[r]
            ids = ids[: self.passes - row.began]
            text = self.policy.decode(ids)
            finish = self._finish(row, ids, text)
            if finish:
                done.append((row, ids, text, finish))
            elif row.switch is None and (self.policy.form.closing in text or len(ids) >= self.how.strategy_tokens):
                row.switch = len(ids)
                cooled.append(row)
        if cooled:
            at = torch.tensor([row.at for row in cooled], device=self.device)
            self.hot[at], self.temp[at] = False, self.how.token_temp
            self.look_at[at] = torch.tensor([row.budget for row in cooled], device=self.device)
        if done:
            at = [row.at for row, *_ in done]
            logps, temps = self.logps[at].tolist(), self.drawn_at[at].tolist()
            for reply, *drawn in zip(done, logps, temps, strict=True):
                self._end_reply(*reply, *(values[: len(reply[1])] for values in drawn))
        return [row for row, *_ in done]

    def _finish(self, row: Row, ids: list[int], text: str) -> str:
        """How the reply `ids` ended: "stop" or "length"; "" if it goes on."""
        if ids[-1] in self.policy.stop_ids or any(stop in text for stop in self.policy.form.stop):
            return "stop"
        return "length" if len(ids) >= row.budget else ""

    def reply_budget(self, row: Row) -> int:
        """Tokens that the reply which begins now may have (the benchmark overrides this)."""
        return self.how.reply_tokens

    def _begin_replies(self, rows: list[Row]) -> None:
        """Set rows to the start of a hot strategy (or, in a format without one, of a cool action); the last pending
        id is the one to be fed."""
        hot, how = bool(self.policy.form.closing), self.how

        def column(values) -> torch.Tensor:
            return torch.tensor(list(values), device=self.device)

        for row in rows:
            row.switch, row.began = None if hot else 0, self.passes
            row.budget = min(self.reply_budget(row), self.policy.context - len(row.episode.ids))
        at = column(row.at for row in rows)
        self.newest[at] = column(len(row.episode.ids) - 1 for row in rows)
        self.last[at] = column(row.pending[-1] for row in rows)
        self.look_at[at] = column(min(row.budget, how.strategy_tokens) if hot else row.budget for row in rows)
        self.temp[at], self.hot[at], self.count[at] = how.strategy_temp if hot else how.token_temp, hot, 0
        self.longest = max([self.longest] + [len(row.episode.ids) for row in rows])

    def _end_reply(self, row: Row, ids: list[int], text: str, finish: str, logprobs: list, temps: list) -> None:
        """Record a reply (its ids, text, and the log-prob and temperature of each), step its world, and queue
        what the world answers."""
        episode, switch = row.episode, len(ids) if row.switch is None else row.switch
        if any(math.isnan(logprob) for logprob in logprobs):
            raise FloatingPointError("the model's logits are not numbers: its weights are broken")
        episode.extend(ids, True, logprobs, temps, [STRATEGY] * switch + [ACTION] * (len(ids) - switch))
        strategy, action = self.policy.parse(text)
        episode.turns.append(Turn(row.observation, strategy, action, finish))
        began = time.perf_counter()
        row.observation, reward, terminated, truncated, info = row.env.step(action)
        self.seconds["worlds"] += time.perf_counter() - began
        episode.outcome, episode.feedback = info["outcome"], info["feedback"]
        if terminated or truncated:
            episode.reward, episode.finish = reward, "success" if reward > 0 else "failure"
            return
        glue = self.policy.turn_ids(row.observation, ids[-1])
        if len(episode.ids) + len(glue) >= self.policy.context:  # no room for even one more token
            episode.finish = "context"
            return
        # the reply's last token was sampled but never fed to the model: it is the first to be read
        row.pending = [ids[-1]] + glue
        episode.extend(glue, False)
        self.starting.append(row)

    # -- episodes come and go --------------------------------------------------------------------------

    def _leave(self, ended: list[Row]) -> None:
        """Take ended episodes out; new ones or the last rows take their places."""
        for row in ended:
            self.episodes[row.job] = row.episode
            self.tick()
        for row in sorted(ended, key=lambda row: -row.at):  # from the back: what is last has not ended
            if self.next_job < len(self.jobs):
                self._start_episodes([row.at])
                continue
            moved = self.rows.pop()
            if moved is not row:
                self._move(moved, row.at)
        self.longest = max((len(row.episode.ids) - len(row.pending) + self._decoded(row) for row in self.rows), default=0)

    def _decoded(self, row: Row) -> int:
        """Tokens of the current reply that are not in the record yet."""
        return 0 if row.pending else self.passes - row.began

    def _move(self, row: Row, at: int) -> None:
        self.cache.copy_from(self.cache, row.at, at, min(self.longest, self.cache.capacity))
        for name in self.per_row:
            tensor = getattr(self, name)
            tensor[at] = tensor[row.at]
        self.rows[at], row.at = row, at

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

    def _start_episodes(self, places) -> None:
        """Start the next episodes in the given rows of the cache.  Distinct prompts that are new are read first."""
        jobs = range(self.next_job, min(self.next_job + len(places), len(self.jobs)))
        self._read_prompts({self.starts[j][2] for j in jobs})
        for at, j in zip(places, jobs, strict=False):
            job, (env, observation, ids) = self.jobs[j], self.starts[j]
            row = Row(Episode(job.task, job.reflection, job.group), env, observation, j, at)
            self.rows[at : at + 1] = [row]  # in the place of an ended one, or at the end
            row.episode.extend(list(ids), False)
            # The group shares the keys and values of all but the prompt's last token; each row feeds that
            # one itself and so gets the logits of its own first token.
            row.pending = [ids[-1]]
            self.starting.append(row)
            self.longest = max(self.longest, len(ids))
            self._make_room()
            prompt = self.prompts[ids]
            self.cache.copy_from(prompt[0], prompt[1], at, len(ids) - 1)
            prompt[2] -= 1
            if not prompt[2]:
                del self.prompts[ids]  # its last episode has started
        self.next_job += len(jobs)

    def _read_prompts(self, prompts: set[tuple]) -> None:
        """Compute keys and values of prompts that no row has had yet, some at a time, each into a row of its own."""
        new = sorted((ids for ids in prompts if self.prompts[ids][0] is None), key=len)
        while new:
            longest = len(new[-1])
            n = max(1, PROMPT_TOKENS // longest)
            batch, new = new[-n:], new[:-n]
            cache = RaggedCache(self.model.config, len(batch), longest, self.model.dtype, self.device)
            for i, ids in enumerate(batch):
                self.prompts[ids][:2] = [cache, i]
            began = time.perf_counter()
            nobody = torch.zeros(0, dtype=torch.long, device=self.device)
            at = plan(nobody, [(i, 0, len(ids)) for i, ids in enumerate(batch)], longest, self.model.dtype)
            forward(self.body, cache, torch.tensor([i for ids in batch for i in ids], device=self.device), at)
            self.seconds["model"] += time.perf_counter() - began


PROMPT_TOKENS = 8192  # of prompts read in one pass, at most


def token_bytes(model) -> int:
    """Bytes of one token's keys and values in all layers."""
    heads, dim = kv_shape(model.config)
    return 2 * model.config.num_hidden_layers * heads * dim * model.dtype.itemsize


def slots_within(policy: Policy, how: Sampling) -> int:
    """How many tokens' keys and values fit into the cache's memory budget."""
    return int(how.cache_gb * 2**30 / token_bytes(policy.model))


def row_count(policy: Policy, how: Sampling, episodes: int) -> int:
    """How many episodes to decode side by side, within `how.rows` and the cache's memory budget (at 1024 tokens a row;
    longer conversations make the cache outgrow it)."""
    fit = slots_within(policy, how) // min(policy.context, 1024)
    if fit < 1:
        raise ValueError(f"cache_gb={how.cache_gb} has no room for one row of {min(policy.context, 1024)} tokens: raise it")
    return max(1, min(how.rows, episodes, fit))


@contextmanager
def attending(model, name: str):
    """Gives a model the attention of this name in Hugging Face's table.  It gets its own back, also after an error."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def ragged(model):
    """Lets a model sample: eval mode (dropout must not differ between sampling and training) and the attention of
    this file.  It is given back as it was, also after an error."""
    was_training = model.training
    model.eval()
    try:
        with attending(model, "ragged"):
            yield
    finally:
        model.train(was_training)


@torch.inference_mode()
def rollout(
    policy: Policy, world: str, jobs: list[Job], how: Sampling, generator: torch.Generator, tick=lambda: None
) -> list[Episode]:
    """Play every job to its end and return the episodes in the order of the jobs.

    generator: the random stream that sampling draws from (on the policy's device).
    tick: called once per finished episode, for progress bars.
    Meanwhile the model is as `ragged` has it.
    """
    if not jobs:
        return []
    with ragged(policy.model):
        return Rollout(policy, world, jobs, how, generator, tick).run()
