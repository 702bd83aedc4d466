"""Two processes, started by torchrun and talking by gloo, train the model that one process trains."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import envs
import grpo
import parallel
import train
from conftest import play_coins, smallest_run
from policy import load_policy, make_optimizer
from test_train import checkpoint_of, equal, metrics_of, new_run, quiet, same_run

HERE = Path(__file__).parent
SETTINGS = dict(tasks_per_update=3, group_size=4, updates=2)  # three groups for two processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo here"
)

SCRIPT = """
import json, pickle, sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = {paths!r}
import conftest
conftest.play_coins()
import torch
import grpo, parallel, train
from policy import load_policy, make_optimizer

parallel.join()
torch.set_num_threads(1)
me, out = parallel.rank(), Path({out!r})
for kind in {kinds!r}:  # an update on given episodes
    episodes, how = pickle.loads((out / f"{{kind}}.pkl").read_bytes())
    policy = load_policy({base!r}, "house")
    start = load_policy({base!r}, "house").model if how.kl else None
    generator = torch.Generator().manual_seed(0)
    metrics = grpo.update(policy, make_optimizer(policy.model, 1e-3), episodes, how, generator, None, start)
    (out / f"{{kind}}-{{me}}.json").write_text(json.dumps(metrics))
    torch.save(policy.model.state_dict(), out / f"{{kind}}-{{me}}.pt")
code = [train.main(flags) for flags in {runs!r}]  # whole runs
(out / f"codes-{{me}}.json").write_text(json.dumps(code))
parallel.leave()
"""

UPDATES = {
    "plain": dict(minibatch_steps=8, micro_tokens=400),
    "one row a minibatch": dict(minibatch_steps=1, epochs=1),  # the other process has nothing to do
    "terms": dict(minibatch_steps=8, kl=0.1, entropy_alpha=0.4, loss_norm="sequence"),
}


@pytest.fixture(scope="module")
def together(micro_base, tmp_path_factory):
    """The folder in which two processes left an update of each kind and three runs; and the episodes of the updates."""
    out = tmp_path_factory.mktemp("two")
    with pytest.MonkeyPatch.context() as patch:
        play_coins(patch.setattr)
        run = new_run(smallest_run(micro_base, out / "rollouts", tasks_per_update=4, group_size=4))
        episodes, _ = run.collect(quiet)
    for kind, how in UPDATES.items():
        (out / f"{kind}.pkl").write_bytes(pickle.dumps((episodes, grpo.UpdateSettings(**how))))
    runs = [
        smallest_run(micro_base, out / "whole", **SETTINGS, warmup=2, warmup_batch=3),
        smallest_run(micro_base, out / "half", **SETTINGS | {"updates": 1}, warmup=2, warmup_batch=3, lr_schedule="constant"),
        ["--resume", str(out / "half"), "--updates", "2"],
        smallest_run(micro_base, out / "constant", **SETTINGS, warmup=2, warmup_batch=3, lr_schedule="constant"),
    ]
    script = out / "script.py"
    paths = [str(HERE), str(HERE.parent)]
    script.write_text(SCRIPT.format(paths=paths, out=str(out), base=micro_base, kinds=list(UPDATES), runs=runs))
    done = torchrun(script)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, episodes, done


def torchrun(*command):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *map(str, command)], capture_output=True, text=True, env=threads)


@pytest.mark.parametrize("kind", UPDATES)
def test_an_update_shared_by_two_processes_is_the_update_of_one(together, micro_base, kind):
    """Same episodes, same minibatches, one token count: the same weights and the same metrics, in both."""
    out, episodes, _ = together
    how = grpo.UpdateSettings(**UPDATES[kind])
    policy, before = load_policy(micro_base, "house"), load_policy(micro_base, "house").model
    generator, start = torch.Generator().manual_seed(0), load_policy(micro_base, "house").model if how.kl else None
    metrics = grpo.update(policy, make_optimizer(policy.model, 1e-3), episodes, how, generator, None, start)
    alone = policy.model.state_dict()
    first, second = (torch.load(out / f"{kind}-{i}.pt") for i in (0, 1))
    assert equal(first, second)
    moved = max((alone[name] - weight).abs().max().item() for name, weight in before.state_dict().items())
    assert moved > 1e-3 and all(torch.allclose(first[name], alone[name], atol=1e-5, rtol=0) for name in alone)
    seen = [json.loads((out / f"{kind}-{i}.json").read_text()) for i in (0, 1)]
    assert seen[0] == seen[1] and seen[0] == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_a_row_belongs_to_one_process(qwen_rows, monkeypatch):
    """No row twice, none left out, about as many tokens each, equal prompts side by side."""
    monkeypatch.setattr(parallel, "world_size", lambda: 3)
    parts = []
    for i in range(3):
        monkeypatch.setattr(parallel, "rank", lambda i=i: i)
        parts.append(grpo.share(qwen_rows))
    assert sorted(map(id, sum(parts, []))) == sorted(map(id, qwen_rows))
    sizes = [sum(len(row.ids) for row in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * max(len(row.ids) for row in qwen_rows)
    assert sum(len({row.prompt_key for row in part}) for part in parts) <= len({row.prompt_key for row in qwen_rows}) + 2


@pytest.fixture
def qwen_rows(together):
    return [grpo.Row(e, 1.0, "cpu") for e in together[1] if any(e.mask)]


def test_a_run_of_two_processes_writes_what_one_does_and_once(together):
    """The first process writes and prints; a warm-up, evaluations and the summary are those of any run."""
    out, _, done = together
    assert [json.loads((out / f"codes-{i}.json").read_text()) for i in (0, 1)] == [[0, 0, 0, 0]] * 2
    metrics = metrics_of(out / "whole")
    assert [m["update"] for m in metrics] == [1, 2] and all(m["episodes"] == 12 for m in metrics)
    assert sum(m["optimizer_steps"] for m in metrics) > 0 and all(m["first_ratio_off_action"] < 1e-4 for m in metrics)
    summary = json.loads((out / "whole" / "summary.json").read_text())
    assert summary.keys() == {*envs.TIERS, "totals"} and "warmup_pass@1" in summary["easy"]
    assert done.stdout.count("update   2/2") == 3  # the runs that made a second update


def test_each_process_samples_from_a_stream_of_its_own(together):
    _, state, _ = checkpoint_of(together[0] / "whole")
    assert len(state["sampling_rng"]) == 2 and not torch.equal(*state["sampling_rng"])


def test_a_run_of_two_processes_resumes_to_the_last_bit(together):
    assert same_run(together[0] / "constant", together[0] / "half")


def test_a_run_of_two_processes_is_not_resumed_by_one(together, coins, capsys):
    assert train.main(["--resume", str(together[0] / "whole"), "--updates", "3"]) == 2
    assert "torchrun --nproc_per_node=2" in capsys.readouterr().err
