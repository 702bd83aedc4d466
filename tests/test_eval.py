"""pass@k, the commands of eval.py, and that wrong flags of both programs are refused in one line."""

import itertools
import json

import pytest
import torch

import envs
import eval as evaluation
import train
from eval import mean_pass_at_k, pass_at_k, read_run
from policy import load_policy

# -- fixtures --------------------------------------------------------------------------------------------


def ended(main, argv):
    """The exit code of a program that was called with argv, whether it returns it or raises SystemExit."""
    try:
        return main([str(a) for a in argv])
    except SystemExit as error:
        return error.code


def refused(main, argv, capsys):
    """The one line that a program says when it refuses argv with code 2."""
    assert ended(main, argv) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip() and "%|" not in line]  # no bars
    assert len(said) == 1, said
    return said[0]


def finished_run(folder, method="sge", hard=0.5, seed=0, summary=True):
    """A run folder as train.py leaves it, with made-up figures."""
    folder.mkdir()
    config = dict(env="house", method=method, seed=seed, model="tiny", reflect="both", strategy_temp=1.2, token_temp=0.7)
    lines = [dict(update=i, total_env_steps=1000 * i, **{f"eval_{t}": hard for t in envs.TIERS}) for i in (1, 2, 3)]
    row = {"base_pass@1": 0.1, "base_pass@256": 0.4, "pass@1": hard, "test_pass@1": hard / 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        totals = dict(episodes=100, env_steps=3000, wall_seconds=9.0)
        (folder / "summary.json").write_text(json.dumps({t: row for t in envs.TIERS} | {"totals": totals}))
    return folder


# -- pass@k ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, c, k, right",
    [
        (10, 3, 5, 0.9166667), (16, 1, 16, 1), (16, 0, 16, 0), (16, 1, 8, 0.5), (5, 2, 3, 0.9), (4, 1, 1, 0.25),
        (2048, 1, 256, 0.125), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (4, 0, 4, 0.0), (4, 4, 1, 1.0),
    ],
)  # fmt: skip
def test_pass_at_k_by_the_vectors(n, c, k, right):
    """paper.md 9, J98, J100: plug-in and bootstrap estimates give .8319 for the first and .684 for (4, 1, 4)."""
    assert pass_at_k(n, c, k) == pytest.approx(right, abs=1e-7)


def test_pass_at_k_is_the_share_of_subsets_with_a_success():
    """J98, J100: by counting, for every n up to 7."""
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("n, c, k", [(2, 0, 5), (1, 1, 10), (4, 1, 0), (4, 5, 2), (4, -1, 2), (0, 0, 1)])
def test_what_cannot_be_estimated_is_refused(n, c, k):
    """J98, J99: k > n takes a shortcut to 1.0; a single greedy sample becomes pass@10."""
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_the_mean_is_over_tasks_not_pooled_over_tries():
    """J99: 4 and 0 of 4 successes, k=2: .5 (pooled .786); tries of equal outcome have pass@k = pass@1."""
    counts = [dict(tries=4, successes=4), dict(tries=4, successes=0)]
    assert mean_pass_at_k(counts, 2) == mean_pass_at_k(counts, 1) == 0.5
    uneven = [dict(tries=2, successes=1), dict(tries=10, successes=0)]
    assert mean_pass_at_k(uneven, 1) == 0.25  # pooled: 1/12


def test_successes_are_counted_for_every_task_in_order(micro_base, coins, monkeypatch):
    """J101: dead or skipped tasks fall out of the denominator.  The last task pays nothing, whatever is said."""
    tasks = envs.tasks("house", "test") + envs.tasks("house", "train")

    class Stingy(coins):
        def step(self, action):
            observation, reward, won, lost, info = super().step(action)
            if self.task is tasks[-1]:
                reward, won, lost = 0.0, False, won or lost
            return observation, reward, won, lost, info

    monkeypatch.setattr(envs, "make_env", lambda world: Stingy())
    policy, how = load_policy(micro_base, "house"), evaluation.Sampling(1.0, 1.0, reply_tokens=20)
    counts = evaluation.count_successes(policy, "house", tasks, 8, how, seed=0)
    assert [(c["task"], c["tier"], c["tries"]) for c in counts] == [(t.id, t.tier, 8) for t in tasks]
    assert counts[-1]["successes"] == 0 and 0 < sum(c["successes"] for c in counts) < 8 * len(tasks)
    assert counts == evaluation.count_successes(policy, "house", tasks, 8, how, seed=0)
    assert counts != evaluation.count_successes(policy, "house", tasks, 8, how, seed=1)


# -- commands --------------------------------------------------------------------------------------------


def test_passk_prints_what_it_writes(micro_base, coins, capsys, tmp_path):
    """--json repeats the figures on the last line; --out lists every task."""
    out = tmp_path / "counts.json"
    argv = ["passk", micro_base, "--n", "5", "--token-temp", "1", "--device", "cpu", "--json", "--out", str(out)]
    assert evaluation.main(argv) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    counts = {c["tier"]: c for c in json.loads(out.read_text())}  # one task a tier
    assert set(counts) == set(envs.TIERS) and sum(c["successes"] for c in counts.values()) > 0
    for tier, c in counts.items():
        rates = {f"pass@{k}": pass_at_k(5, c["successes"], k) for k in (1, 2, 4)}
        assert figures[tier] == rates | {"tasks": 1, "tasks_solved_0": int(c["successes"] == 0)}


@pytest.mark.parametrize("temperature", ["0", "0.3"])
def test_passk_takes_the_strategy_temperature_that_is_asked_for(micro_base, coins, capsys, temperature):
    """0 is a temperature (greedy), not "not given"."""
    argv = ["passk", micro_base, "--n", "1", "--strategy-temp", temperature, "--token-temp", "0.9", "--device", "cpu"]
    assert evaluation.main(argv) == 0
    assert f"temperatures {float(temperature)}/0.9" in capsys.readouterr().out


def test_compare_averages_over_the_seeds_of_a_method(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [finished_run(tmp_path / "a", hard=0.2), finished_run(tmp_path / "b", hard=0.6, seed=1)]
    runs += [finished_run(tmp_path / "c", method="grpo", hard=0.0)]
    assert evaluation.main(["compare", *map(str, runs), "--out", "curves.png", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["house sge"]["hard"] == pytest.approx({"pass@1": 0.4, "test_pass@1": 0.2, "runs": 2})
    assert figures["house grpo"]["hard"]["pass@1"] == 0
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("lacks", ["everything", "config.json", "metrics.jsonl", "summary.json", "sense"])
def test_compare_refuses_what_is_no_finished_run_in_one_line(tmp_path, capsys, lacks):
    good, bad = finished_run(tmp_path / "good"), finished_run(tmp_path / "bad")
    if lacks == "everything":
        bad = tmp_path / "nowhere"
    elif lacks == "sense":
        (bad / "config.json").write_text("{ broken")
    else:
        (bad / lacks).unlink()
    said = refused(evaluation.main, ["compare", good, bad, "--out", tmp_path / "x.png"], capsys)
    assert str(bad) in said
    assert not (tmp_path / "x.png").exists()


def test_an_unfinished_run_can_be_read_and_a_mere_folder_cannot(tmp_path):
    config, metrics, summary = read_run(str(finished_run(tmp_path / "a", summary=False)))
    assert config["method"] == "sge" and [m["update"] for m in metrics] == [1, 2, 3] and summary == {}
    with pytest.raises(ValueError, match="no run folder"):
        read_run(str(tmp_path))


# -- wrong flags -----------------------------------------------------------------------------------------

WRONG_FOR_TRAIN = """
--frobnicate | --updates | --updates many | --updates 0 | --updates 1.5 | --lr fast | --lr 0 | --lr nan | --lr inf
--env moon | --method magic | --reflect sometimes | runs/extra | --group-size 1 | --clip 1.5 | --clip nan
--token-temp 0 | --strategy-temp -1 | --strategy-temp inf | --p-fail -0.1 | --p-fail nan | --p-success nan
--p-fail 0.9 --p-success 0.2 | --buffer-size 0 | --threads -1 | --eval-every -1 | --seed 99999999999999999999999999
"""
WRONG_FOR_EVAL = """
juggle | passk no/m --frobnicate | passk no/m --n many | passk no/m --n 0 | passk no/m --rows 0 | passk no/m --env moon
passk no/m --tier brutal | passk no/m --split dev | passk no/m --threads -1 | passk no/m --seed 99999999999999999999
passk no/m --token-temp -1 | passk no/m --token-temp nan | passk no/m --strategy-temp nan | passk no/m --token-temp inf
"""


def each(lines):
    return pytest.mark.parametrize(
        "argv", [part.strip() for part in lines.replace("\n", "|").split("|") if part.strip()]
    )


@each(WRONG_FOR_TRAIN)
def test_train_refuses_a_wrong_flag_before_anything_is_done(argv, capsys):
    """style.md 5: a wrong flag or value is refused with one clear line, which names it."""
    assert argv.split()[0] in refused(train.parse_flags, argv.split(), capsys)


@each(WRONG_FOR_EVAL)
def test_eval_refuses_a_wrong_flag_before_anything_is_done(argv, capsys):
    flag = next((word for word in argv.split() if word.startswith("--")), argv)
    named = "temperature" if "temp" in flag else flag
    assert named in refused(evaluation.main, argv.split(), capsys).replace("-temp", "temperature")


@pytest.mark.parametrize("argv, missing", [([], "command"), (["passk"], "RUN_OR_MODEL"), (["compare"], "RUN")])
def test_eval_says_what_is_missing(argv, missing, capsys):
    assert missing in refused(evaluation.main, argv, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_in_one_line(micro_base, coins, capsys):
    assert "cuda" in refused(train.parse_flags, ["--device", "cuda"], capsys).lower()
    assert "cuda" in refused(evaluation.main, ["passk", micro_base, "--n", "1", "--device", "cuda"], capsys).lower()


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "no-such-model-anywhere"])
def test_a_model_that_is_not_there_is_said_in_one_line(name, capsys, tmp_path):
    assert name in refused(train.main, ["--model", name, "--out", tmp_path / "run"], capsys)
    assert not (tmp_path / "run").exists()
    assert name in refused(evaluation.main, ["passk", name, "--n", "1"], capsys)


def test_a_folder_without_a_model_is_said_in_one_line(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(train.main, ["--model", tmp_path / "empty", "--out", tmp_path / "run"], capsys)


@pytest.mark.parametrize("stored", [None, "{ broken", '{"frobnicate": 1}', '{"updates": 0}', "[]"])
def test_what_cannot_be_resumed_is_said_in_one_line(stored, capsys, tmp_path):
    """No folder, a torn file, settings of another version of the program, settings that make no sense."""
    folder = tmp_path / "run"
    if stored is not None:
        folder.mkdir()
        (folder / "config.json").write_text(stored)
    refused(train.main, ["--resume", folder], capsys)


def test_a_run_without_a_checkpoint_cannot_be_resumed(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "checkpoint" in refused(train.main, ["--resume", tmp_path], capsys)


@pytest.mark.parametrize("flag", [["--seed", "1"], ["--lr=1e-3"], ["--out", "elsewhere"], ["--model", "tiny"]])
def test_resume_keeps_the_settings_and_refuses_others(flag, capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert flag[0].split("=")[0] in refused(train.parse_flags, ["--resume", tmp_path, *flag], capsys)
    assert "updates" in refused(train.parse_flags, ["--resume", tmp_path, "--updates", "0"], capsys)
    for spelling in (["--updates", "7"], ["--updates=7"]):
        config, folder = train.parse_flags(["--resume", str(tmp_path), *spelling])
        assert config.updates == 7 and config.out == folder == str(tmp_path)


@pytest.mark.parametrize("place", ["run", "file", "file/run"])
def test_a_run_folder_that_cannot_be_made_is_said_in_one_line(place, train_flags, coins, capsys, tmp_path):
    """A run is there already; a file has the name; a file is where a folder should be."""
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    assert place in refused(train.main, train_flags("x", out=tmp_path / place), capsys)
    assert (tmp_path / "file").read_text() == "mine"
