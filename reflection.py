"""Strategy prompts and strategy reflection: what a rollout is asked to do.  (stdlib only)

SGE 3.2 asks the agent to write a strategy before every action, and conditions some training rollouts on
the strategies of an earlier episode of the same task:

  plain      write a strategy, then act                                (all methods, all evaluation)
  negative   an earlier episode failed with these strategies: criticise them, then do better
  positive   an earlier episode succeeded with these strategies: write one in their spirit

This file holds the form of a reply (`ReplyFormat`), the texts (`instruction`), and the two first-in
first-out buffers of strategies that each task has (`StrategyBuffers`).

Where the paper leaves a choice open, this is what happens here (numbers of the list in README.md):
  1. one buffer of failures and one of successes per task            setting `buffer_scope` = task | family
  2. the entry is drawn uniformly                                    setting `buffer_pick` = uniform | newest
  3. one draw per trajectory; the same reference stands in its prompt at every step, because the
     conversation is only ever appended to
  4. one uniform number decides between negative, positive and plain; an empty buffer falls to plain
  6. the critique is part of the strategy block, hence sampled hot
  7. the strategy block is stored as it was written                  setting `buffer_store` = block | last_paragraph
"""

import random
from collections import deque
from dataclasses import dataclass

# ------------------------------------------------------------------------------------------------------
# the form of a reply
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplyFormat:
    """How a reply is laid out: opening + strategy + closing + action.

    `opening` ends the prompt and is never sampled.  The strategy reaches up to the first `closing`;
    everything after it is the action.  Tokens are hot until `closing` is complete in the text.
    `stop` texts end a reply that does not end itself (a model starting its next strategy, say).
    Without `closing` there is no strategy: the whole reply is the action.
    """

    opening: str
    closing: str
    write: str  # how the instruction tells the agent where the strategy goes ...
    act: str  # ... and where the action goes
    stop: tuple[str, ...] = ()


FORMATS = {
    # Coding and LangR use headers, AndroidWorld tags, AppWorld the model's own thinking (SGE A.1)
    "header": ReplyFormat(
        "### Strategy\n", "### Action", "under the header ### Strategy", "under the header ### Action", ("### Strategy",)
    ),
    "tags": ReplyFormat(
        "<strategy>", "</strategy>", "between <strategy> and </strategy>", "after </strategy>", ("<strategy>",)
    ),
    "think": ReplyFormat("<think>\n", "</think>", "as your thinking", "as your answer", ("<think>",)),
    # the comparison without the strategy prompt (SGE 4.4), and the episodes of RLAD that skip it (SGE A.4)
    "none": ReplyFormat("", "", "", ""),
}


def parse_reply(text: str, form: ReplyFormat) -> tuple[str, str]:
    """Split the sampled text of a reply into (strategy, action), both stripped.

    Without a closing delimiter everything is strategy and the action is empty (the world will say that
    this is no action).

    >>> parse_reply("look at the bed\\n### Action\\ngo bed", FORMATS["header"])
    ('look at the bed', 'go bed')
    """
    strategy, _, action = text.partition(form.closing) if form.closing else ("", "", text)
    for stop in form.stop:
        strategy, action = strategy.partition(stop)[0], action.partition(stop)[0]
    return strategy.strip(), action.strip()


# ------------------------------------------------------------------------------------------------------
# what a rollout is asked to do
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reflection:
    """What a rollout is conditioned on: a mode, and the strategies of one earlier episode in order."""

    mode: str = "plain"  # "plain" | "negative" | "positive" | "bare" (RLAD: without a strategy; needs form "none")
    strategies: tuple[str, ...] = ()
    feedback: str = ""  # what the world said about the failure, if anything


PLAIN = Reflection()
BARE = Reflection("bare")


def instruction(reflection: Reflection, form: ReplyFormat, brief: bool) -> str:
    """The strategy prompt (SGE A.1, in own words).  `brief` is the wording for the tiny model."""
    if not form.closing:
        return "Action." if brief else "At each step, write exactly one action, and nothing else."
    shown = "; ".join(reflection.strategies)
    if brief:
        return {
            "plain": "Strategy, then action.",
            "negative": f"Failed: {shown}. {reflection.feedback} Strategy, then action.".replace("  ", " "),
            "positive": f"Worked: {shown}. Strategy, then action.",
        }[reflection.mode]
    act = f"Then write, {form.act}, exactly one action that follows from your strategy, and nothing else."
    if reflection.mode == "plain":
        return f"At each step, first write {form.write} a short strategy for what to do next. {act}"
    if reflection.mode == "positive":
        return (
            f"These strategies, one a step, led to success on this task before: {shown}. At each step, first write "
            f"{form.write} a short strategy of your own that is inspired by them. {act}"
        )
    told = f" The result was: {reflection.feedback}" if reflection.feedback else ""
    return (
        f"These strategies, one a step, failed on this task before: {shown}.{told} At each step, first write "
        f"{form.write} what was wrong with them and how to mend that, then a better strategy that tries something "
        f"new. {act}"
    )


# ------------------------------------------------------------------------------------------------------
# the buffers
# ------------------------------------------------------------------------------------------------------


class StrategyBuffers:
    """A FIFO of failed and a FIFO of successful strategy sequences for every task (SGE 3.2, A.2).

    size: entries a FIFO holds (Table 2: 32).  p_fail, p_success: probability that a rollout reflects on
    a failure / a success (Table 2: 0.25 / 0.1); their sum must be at most 1.
    """

    def __init__(
        self, size: int = 32, p_fail: float = 0.25, p_success: float = 0.1, pick: str = "uniform", store: str = "block"
    ):
        if pick not in ("uniform", "newest") or store not in ("block", "last_paragraph"):
            raise ValueError(f"pick is uniform or newest, store is block or last_paragraph: {pick=} {store=}")
        if size < 1 or not (p_fail >= 0 and p_success >= 0 and p_fail + p_success <= 1):
            raise ValueError(f"need size >= 1 and probabilities with a sum of at most 1: {size=} {p_fail=} {p_success=}")
        self.size, self.p_fail, self.p_success, self.pick, self.store = size, p_fail, p_success, pick, store
        self.entries: dict[tuple[str, bool], deque] = {}  # (key, success) -> deque of (strategies, feedback)

    def push(self, key: str, success: bool, strategies: list[str], feedback: str = "") -> None:
        """Remember an episode: the strategies of all its steps, in order.  The oldest entry falls out."""
        if self.store == "last_paragraph":  # drops a critique that precedes the strategy proper
            strategies = [s.split("\n\n")[-1].strip() for s in strategies]
        kept = tuple(s for s in strategies if s)
        if kept:  # an episode that never wrote a strategy has nothing to reflect on
            fifo = self.entries.setdefault((key, success), deque(maxlen=self.size))
            fifo.append((kept, "" if success else feedback))

    def draw(self, key: str, rng: random.Random) -> Reflection:
        """What the next rollout of this task is conditioned on.  Always consumes two random numbers, so
        that the stream of draws does not depend on what the buffers hold."""
        x, y = rng.random(), rng.random()
        if x < self.p_fail:
            mode, fifo = "negative", self.entries.get((key, False))
        elif x < self.p_fail + self.p_success:
            mode, fifo = "positive", self.entries.get((key, True))
        else:
            return PLAIN
        if not fifo:
            return PLAIN
        strategies, feedback = fifo[-1 if self.pick == "newest" else int(y * len(fifo))]
        return Reflection(mode, strategies, feedback)

    def state_dict(self) -> list:
        """Everything that was remembered, as plain data, oldest first."""
        return [[key, success, [list(entry) for entry in fifo]] for (key, success), fifo in self.entries.items()]

    def load_state_dict(self, state: list) -> None:
        self.entries = {
            (key, success): deque(((tuple(s), f) for s, f in fifo), maxlen=self.size) for key, success, fifo in state
        }
