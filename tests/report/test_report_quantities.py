"""Names of quantities in a report are the same for old and new runs."""

from pathlib import Path

from report_files import make_run, row

from nash_mhc.report.contents import contents, open_run

EVAL = {"step": 4, "eval/loss": 2.0}


def test_rows_of_older_runs_say_what_is_what(tmp_path: Path) -> None:
    """Their `loss` is the objective: for a student, the KL from its teacher."""
    rows = [row(s, **{"loss": 0.5, "loss/ce": 4.0, "kl": 0.5}) for s in (1, 2)]
    run = open_run(make_run(tmp_path, rows, [EVAL | {"eval/kl": 0.625}]))
    found = contents(run)
    assert (found["rows"]["loss"], found["rows"]["kl"]) == ([4.0, 4.0], [0.5, 0.5])
    assert found["facts"]["final loss, nats/token"] == "4.0000"
    assert found["facts"]["held-out KL from the teacher, nats/token"] == "0.6250"
    assert run.rows[0]["objective"] == 0.5 and "loss/ce" not in run.rows[0]


def test_of_puzzles_it_says_how_many_are_solved(tmp_path: Path) -> None:
    evals = [EVAL | {"eval/exact": 0.75, "eval/exact_stopping": 0.5, "eval/passes": 3.5}]
    found = contents(open_run(make_run(tmp_path, [row(4, exact=0.25)], evals)))
    assert found["facts"]["held-out puzzles solved"] == "75.0%"
    assert found["facts"]["solved when it stops early"] == "50.0%"
    assert (found["rows"]["exact"], found["evals"]["eval/exact"]) == ([0.25], [0.75])
