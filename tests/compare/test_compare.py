"""Comparisons of runs made by hand, so that every number of the table is known."""

import copy
import json
import pathlib

import numpy as np
import pytest

from tests.helpers import tiny_tree
from xsa_jax.compare import comparison
from xsa_jax.compare.__main__ import main
from xsa_jax.config.stored import digest, from_stored
from xsa_jax.errors import UserError

pytestmark = pytest.mark.fast

STATISTICS = {
    "value_cosine": 0.3, "self_weight": 0.1, "cosine": 0.5, "cosine_xsa": 0.0, "centred_cosine": 0.25, "centred_cosine_xsa": -0.1,
    "removed": 0.6,
}  # fmt: skip


def evaluation(loss):
    buckets = [{"start": 0, "stop": 1, "loss": loss + 1, "tokens": 10}, {"start": 1, "stop": 16, "loss": None, "tokens": 0}]
    trained = {"context": 16, "loss": loss, "bits_per_byte": 2 * loss, "perplexity": float(np.exp(loss)), "tokens": 160}
    return {
        "store": {"hash": "abc"},
        "losses": [{**trained, "buckets": buckets}, {**trained, "context": 8, "loss": loss + 0.5, "buckets": buckets}],
        "similarity": {name: [[value, value + 0.1], [value, value - 0.1]] for name, value in STATISTICS.items()},
    }


def make_run(
    path: pathlib.Path, kind, loss, times=(None, 0.1, 0.2, 0.9), overrides=None, steps=(20,), devices="1 x cpu"
) -> pathlib.Path:
    (path / "eval").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(tiny_tree({"attention.kind": kind, **(overrides or {})})))
    train = [{"step": i, "split": "train", "loss": loss + 4 - i} for i in range(1, len(times) + 1)]
    train = [record if seconds is None else record | {"step_time": seconds} for record, seconds in zip(train, times, strict=True)]
    validation = [{"step": i, "split": "validation", "loss": loss + 1 / i} for i in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*train, *validation]))
    (path / "starts.jsonl").write_text(json.dumps({"devices": devices}) + "\n")
    for step in steps:
        (path / "eval" / f"{step}.json").write_text(json.dumps(evaluation(loss + 20 - step)))
    return path


@pytest.fixture
def pair(tmp_path):
    return [make_run(tmp_path / "a", "sa", 3.0), make_run(tmp_path / "b", "xsa", 2.9, times=(None, 0.9, None, 0.3, 0.25))]


def rows_of(output):
    return {row["label"]: row for row in json.loads((output / "table.json").read_text())["rows"]}


def test_the_table(pair, tmp_path):
    output = tmp_path / "new" / "report"
    markdown = comparison.compare(pair, output)
    rows = rows_of(output)
    loss = rows["validation loss, nats per token"]
    assert loss["values"] == pytest.approx({"SA": 3.0, "XSA": 2.9})
    assert loss["changes"]["XSA"] == pytest.approx(0.1), "first minus second: above 0 where XSA is better"
    assert rows["bits per byte"]["changes"]["XSA"] == pytest.approx(0.2)
    assert rows["loss at position 0"]["changes"]["XSA"] == pytest.approx(0.1)
    assert rows["loss at position 1-15"]["values"] == {"SA": None, "XSA": None}
    assert rows["loss at context 8"]["values"] == pytest.approx({"SA": 3.5, "XSA": 3.4})
    assert not any("step time" in label for label in rows), "none were measured"
    assert rows["cos(y,v)"]["values"]["SA"] == pytest.approx(0.5)
    assert rows["centred cos(z,v)"]["values"]["XSA"] == pytest.approx(-0.1)

    assert markdown == (output / "table.md").read_text()
    assert "gains of 0.003 to 0.01 nats at small scale" in markdown
    line = next(line for line in markdown.splitlines() if line.startswith("| validation loss"))
    assert [cell.strip() for cell in line.strip("|").split("|")][1:] == ["3.0000", "2.9000", "+0.1000"]
    assert len({(len(line), line.count("|")) for line in markdown.splitlines() if line.startswith("|")}) == 1
    for name in ("loss.png", "position.png", "similarity.png"):
        assert (output / name).read_bytes().startswith(b"\x89PNG")
    assert {path.suffix for path in output.iterdir()} == {".md", ".json", ".png"}


def test_only_attention_may_differ(pair, tmp_path):
    other = make_run(tmp_path / "c", "xsa", 2.8, overrides={"optim.peak_lr": 0.5, "seed": 7, "eval.every": 3})
    output = tmp_path / "report"
    with pytest.raises(
        UserError, match=r"a and .*c differ in more than attention: optim.peak_lr \(0.01 and 0.5\); seed \(0 and 7\)"
    ):
        comparison.compare([pair[0], other], output)
    with pytest.raises(UserError, match=r"attention: seed \(0 and 7\)\."):
        comparison.compare([pair[0], other], output, ["optim"])
    with pytest.raises(UserError, match="seed"):
        comparison.compare([pair[0], other], output, ["optim.peak_lr", "data.workers"])
    assert not output.exists()
    comparison.compare([pair[0], other], output, ["optim.peak_lr", "seed"])
    assert output.exists()


@pytest.mark.parametrize(
    ("name", "hint"), [("see", "did you mean seed"), ("optim.peek_lr", "did you mean optim.peak_lr"), ("", "such as")]
)
def test_a_field_that_does_not_exist_cannot_be_allowed(pair, tmp_path, name, hint):
    with pytest.raises(UserError, match=rf"^{name}: expected a config field or a group of fields.*{hint}"):
        comparison.compare(pair, tmp_path / "report", ["optim", name])


def test_the_same_run_twice_is_refused(pair, tmp_path):
    with pytest.raises(UserError, match=r"a/\.\./a: the same run is given twice"):
        comparison.compare([pair[0], pair[1], pair[0] / ".." / "a"], tmp_path / "report")


def test_several_runs_go_by_folder_and_latest_common_step(tmp_path):
    runs = [make_run(tmp_path / name, kind, 3.0, steps=steps, devices=f"1 x {name}") for name, kind, steps in
            (("a", "sa", (10, 20)), ("b", "xsa", (10,)), ("c", "xsa", (10, 20)))]  # fmt: skip
    markdown = comparison.compare(runs, tmp_path / "report")
    assert "Step 10." in markdown
    assert "several paired seeds" in markdown
    assert "one seed" not in markdown, "these may be several"
    assert f"{runs[0]} - {runs[2]}" in markdown


def test_runs_that_never_logged_at_the_same_step(pair, tmp_path):
    (pair[0] / "metrics.jsonl").write_text(json.dumps({"step": 7, "split": "train", "loss": 1.0}) + "\n")
    (pair[1] / "metrics.jsonl").write_text("")
    comparison.compare(pair, tmp_path / "report")
    assert (tmp_path / "report" / "loss.png").exists()


def test_step_times_are_those_of_steps_that_took_turns(pair, tmp_path):
    times = tmp_path / "times.json"
    configs = {str(run): digest(from_stored(json.loads((run / "config.json").read_text()), "")) for run in pair}
    times.write_text(json.dumps({"pairs": 30, "ratios": {str(pair[0]): 1.0, str(pair[1]): 1.125}, "configs": configs}))
    comparison.compare(pair, tmp_path / "report", step_times=times)
    row = rows_of(tmp_path / "report")["step time over SA's, 30 pairs"]
    assert (row["values"], row["changes"]) == ({"SA": 1.0, "XSA": 1.125}, {})
    # A run that was made again with another config under the same name is another run.
    (pair[1] / "config.json").write_text(json.dumps(tiny_tree({"attention.kind": "xsa", "attention.window": 3})))
    with pytest.raises(UserError, match=r"the step times of .*b were measured with another config; measure them again"):
        comparison.compare(pair, tmp_path / "report", step_times=times)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"pairs": 30, "ratios": {"other": 1.0, "b": 1.0}, "configs": {}},
            r"step times of other, b; expected those of .*a, .*b\. Run python -m",
        ),
        ({"ratios": {}}, "no 'pairs' there"),
        ({"pairs": 3, "ratios": {"a": "fast"}, "configs": {}}, "ratios a expected int or float"),
        ([], "expected an object"),
    ],
)
def test_step_times_of_other_runs_or_damaged_ones_are_refused(pair, tmp_path, content, message):
    times = tmp_path / "times.json"
    times.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message):
        comparison.compare(pair, tmp_path / "report", step_times=times)
    assert not (tmp_path / "report").exists()


def test_what_cannot_be_compared(pair, tmp_path):
    def refused(paths, match):
        with pytest.raises(UserError, match=match):
            comparison.compare(paths, tmp_path / "report")
        assert not (tmp_path / "report").exists()

    refused(pair[:1], "found 1 run")
    refused([pair[0], make_run(tmp_path / "c", "xsa", 1.0, steps=(10,))], r"no step .*a: 20; .*c: 10")
    refused([pair[0], make_run(tmp_path / "d", "xsa", 1.0, steps=())], r"d: not evaluated; run python eval.py --run .*d")
    refused([pair[0], tmp_path / "nowhere"], "nowhere/config.json: cannot be read")
    changed = copy.deepcopy(evaluation(2.0))
    changed["store"]["hash"] = "other"
    (pair[1] / "eval" / "20.json").write_text(json.dumps(changed))
    refused(pair, "not evaluated on the same text.*abc.*other")
    (pair[1] / "eval" / "20.json").write_text("{")
    refused(pair, "20.json: not JSON")
    (pair[1] / "eval" / "20.json").unlink()
    (pair[1] / "config.json").write_text("{}")
    refused(pair, "b/config.json: no 'attention' there; train.py writes it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: {}, "no 'store' there"),
        (lambda whole: [whole], "expected an object, found "),
        (lambda whole: whole | {"losses": []}, "losses expected a list with something in it, found "),
        (lambda whole: whole | {"losses": [{**whole["losses"][0], "loss": "low"}]}, "losses 0 loss expected int or float"),
        (lambda whole: whole | {"similarity": {"cosine": [[1.0]]}}, "similarity no 'value_cosine' there"),
    ],
)
def test_an_incomplete_evaluation_is_named(pair, tmp_path, change, message):
    file = pair[1] / "eval" / "20.json"
    file.write_text(json.dumps(change(evaluation(2.0))))
    with pytest.raises(UserError) as caught:
        comparison.compare(pair, tmp_path / "report")
    assert str(caught.value).startswith(f"{file}: {message}")
    assert str(caught.value).endswith(f"; remove it, or run python eval.py --run {pair[1]} --step 20")


def test_a_loss_that_does_not_exist_leaves_a_gap(pair, tmp_path):
    without = evaluation(2.0)
    without["losses"][0] |= {"loss": None, "bits_per_byte": None}
    (pair[1] / "eval" / "20.json").write_text(json.dumps(without))
    comparison.compare(pair, tmp_path / "report")
    row = rows_of(tmp_path / "report")["validation loss, nats per token"]
    assert (row["values"], row["changes"]) == ({"SA": 3.0, "XSA": None}, {"XSA": None})


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl"])
def test_a_last_line_cut_short_is_passed_over_but_no_other(pair, tmp_path, name):
    file = pair[1] / name
    whole = file.read_text()
    comparison.compare(pair, tmp_path / "whole")
    file.write_text(whole + '{"step": 9, "sp')
    comparison.compare(pair, tmp_path / "cut")
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")
    for line, message in (('{"step": 9, "sp', "not JSON"), ("3", "expected an object, found 3"), ("{}", "no '(step|devices)'")):
        file.write_text(f"{line}\n{whole}")
        with pytest.raises(UserError, match=f"{name}, line 1: {message}.*; restore the file, or remove the line"):
            comparison.compare(pair, tmp_path / "report")
    file.unlink()
    with pytest.raises(UserError, match=f"{name}: cannot be read"):
        comparison.compare(pair, tmp_path / "report")


def test_a_run_without_a_start(pair, tmp_path):
    (pair[0] / "starts.jsonl").write_text("")
    with pytest.raises(UserError, match=r"starts.jsonl: expected a line for each start of the run, found none"):
        comparison.compare(pair, tmp_path / "report")


def test_command(pair, tmp_path, capsys):
    assert main([*map(str, pair), "--output", str(tmp_path / "report")]) == 0
    assert "+0.1000" in capsys.readouterr().out
    assert main([str(pair[0]), "--output", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().err == "compare: found 1 run; expected two or more to compare\n"
