"""Evaluations equal those of lm-eval's backend, on any mesh and batch; mistakes are one line."""

import dataclasses
import functools
import json
import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import yaml
from hub_models import KINDS, save
from runs import at, rows

from nash_mhc.config import ConfigError
from nash_mhc.config.schema import MeshConfig
from nash_mhc.evaluate import __main__ as command
from nash_mhc.evaluate.scoring import Request, Scorer, stories, text_file, windows
from nash_mhc.evaluate.tasks import _by_name, load_tasks, run_task
from nash_mhc.kits.hub.writing import export
from nash_mhc.loading.load import load
from nash_mhc.objectives.vocabulary import sharded_log_probs
from nash_mhc.ops.xent import log_probs_reference
from nash_mhc.parallel.mesh import make_mesh

pytest.importorskip("lm_eval", reason="compares with lm-eval's own backend: pip install 'nash_mhc[eval]'")

QUESTIONS = [
    ("The gardener watered the", [" roses", " thunder", " arithmetic"], 0),
    ("A lamp gives", [" light", " soup"], 0),
    ("Every evening the three brothers carried the nets back up the long stony path to the", [" house", " sun"], 0),
    ("Ships sail on the", [" carpet", " sea"], 1),
    ("Snow is", [" cold", " loud", " green", " a song"], 0),
]
TEXT = "Mira had a small blue kite. She took it to the hill, and the wind was glad of it.\nGrüße! " * 3
CONFIG = small.config(data__seq_len=64, train__total_steps=50, train__eval_interval=25, optim__learning_rate=4e-3)


def task_files(folder):
    """Write a multiple-choice task and a generation task with a stop string."""
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"q": q, "choices": c, "answer": a}) + "\n" for q, c, a in QUESTIONS))
    common = {
        "dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}", "metadata": {"version": 1.0},
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
    }  # fmt: skip
    mean = {"aggregation": "mean", "higher_is_better": True}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    metrics = {"metric_list": [{"metric": name, **mean} for name in ("acc", "acc_norm")]}
    (folder / "choice.yaml").write_text(yaml.dump({"task": "our_choice", **common, **choice, **metrics}))
    write = {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    write |= {"generation_kwargs": {"until": ["d a", "or"], "max_gen_toks": 20, "do_sample": False}}
    metrics = {"metric_list": [{"metric": "exact_match", **mean}]}
    (folder / "writing.yaml").write_text(yaml.dump({"task": "our_writing", **common, **write, **metrics}))
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A tiny run, its exported folder, and two tasks."""
    root = tmp_path_factory.mktemp("evaluate")
    at(root / "run", CONFIG)
    export(load(root / "run"), root / "exported", dtype="float32", shard_bytes=10**9, card="")
    return SimpleNamespace(root=root, run=root / "run", exported=root / "exported", tasks=task_files(root / "tasks"))


@pytest.fixture(scope="session")
def tasks(made):
    return lambda: load_tasks([str(made.tasks)])[0]


def scorer_of(folder, batch_size=8, mesh=None, **changes):
    mesh = make_mesh(mesh or MeshConfig())
    loaded = load(folder, mesh=mesh)
    options = {"longest": loaded.config.data.seq_len, "batch_size": batch_size, "dtype": loaded.dtype} | changes
    return loaded, Scorer(loaded.model, mesh, **options), mesh


def ours(folder, **options):
    from nash_mhc.evaluate.harness_model import HarnessModel

    loaded, scorer, _ = scorer_of(folder, **options)
    return HarnessModel(loaded, scorer)


def by_lm_eval(folder):
    """The hf backend of lm-eval, which needs torch and accelerate."""
    for name in ("torch", "accelerate"):
        pytest.importorskip(name, reason="compares with lm-eval's own backend: pip install 'torch<2.14' accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)


@pytest.fixture(scope="session")
def theirs(made):
    return by_lm_eval(made.exported)


def answers(found):
    """Return (log-likelihood, greedy) of every choice, and every text, by task and document."""
    by_task = {}
    for task, samples in found.samples.items():
        by_document = sorted(samples, key=lambda sample: sample["doc_id"])
        by_task[task] = [response for sample in by_document for responses in sample["resps"] for response in responses]
    return by_task


def figures(found):
    return {(t, m): v for t, metrics in found.figures.items() for m, v in metrics.items() if isinstance(v, float)}


@pytest.fixture(scope="session")
def ours_alone(made, tasks):
    """On one device, eight at a time."""
    return run_task(tasks(), ours(made.run), with_samples=True)


def test_results_equal_the_hf_backend_of_lm_eval(ours_alone, tasks, theirs):
    theirs.task = theirs.is_running = None
    expected = run_task(tasks(), theirs, with_samples=True)
    got, wanted = answers(ours_alone), answers(expected)
    assert set(got) == {"our_choice", "our_writing"}
    assert got["our_writing"] == wanted["our_writing"]
    assert len({len(text) for text in got["our_writing"]}) > 1  # stops have cut them
    for (a, greedy), (b, also) in zip(got["our_choice"], wanted["our_choice"], strict=True):
        assert abs(a - b) < 1e-3
        assert greedy == also
    assert figures(ours_alone) == pytest.approx(figures(expected), abs=1e-6)
    assert figures(ours_alone)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"mesh": MeshConfig(data=2, fsdp=2, tp=2)}], ids=["alone", "eight"])
def test_batching_and_meshes_do_not_change_an_answer(options, made, tasks, ours_alone):
    got, wanted = answers(run_task(tasks(), ours(made.run, **options), with_samples=True)), answers(ours_alone)
    assert got["our_writing"] == wanted["our_writing"]
    for (a, greedy), (b, also) in zip(got["our_choice"], wanted["our_choice"], strict=True):
        assert (a, greedy) == (pytest.approx(b, abs=1e-4), also)


PROGRAM = jax.jit(lambda model, tokens_BT: model(tokens_BT))


def log_softmax(model, tokens, longest):
    """The reference: one sequence at a time, all logits, in double precision."""
    padded = np.pad(np.array([tokens]), ((0, 0), (0, longest - len(tokens))))
    logits = np.asarray(PROGRAM(model, jnp.asarray(padded)), np.float64)[0, : len(tokens)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def by_rows(model, tokens, prefix, longest, context):
    """Score each window by itself, with its context."""
    total, at_ = 0.0, 0
    while at_ < len(tokens):
        count = min(longest if at_ == 0 else longest - context + 1, len(tokens) - at_)
        row = [prefix, *tokens][max(at_ + count - longest, 0) : at_ + count]
        found = log_softmax(model, row, longest)
        total += sum(found[len(row) - count + i, tokens[at_ + i]] for i in range(count))
        at_ += count
    return total


def test_a_text_longer_than_the_context_is_scored_in_windows(made, theirs):
    model, request = ours(made.run), SimpleNamespace(args=(TEXT,))
    tokens = [256, *TEXT.encode()]  # the begin token counts, as lm-eval has it
    assert len(tokens) > 4 * model.max_length
    (got,) = model.loglikelihood_rolling([request])
    assert got == pytest.approx(by_rows(model.loaded.model, tokens, 256, 64, 1), abs=1e-3)
    assert got == pytest.approx(theirs.loglikelihood_rolling([request], disable_tqdm=True)[0], abs=1e-3)


@pytest.mark.parametrize(("count", "longest", "context"), [(0, 8, 1), (1, 8, 1), (8, 8, 1), (9, 8, 4), (40, 8, 4), (7, 3, 3)])
def test_windows_score_every_token_once_with_enough_context(count, longest, context):
    tokens = list(range(count))
    found = list(windows(tokens, -1, longest, context))
    assert [token for row in found for token in row.continuation] == tokens
    for row in found:
        whole = row.context + row.continuation
        assert len(whole) <= longest + 1
        assert whole == [-1, *tokens][whole[0] + 1 :][: len(whole)]
        assert len(row.context) >= min(context, row.continuation[0] + 1)


def test_a_text_file_in_bits_per_byte(made):
    loaded, scorer, _ = scorer_of(made.run)
    tokens = list(TEXT.encode())
    found = text_file("bytes:x", TEXT, loaded, scorer)
    nats = -by_rows(loaded.model, tokens, 256, 64, 32)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(tokens), rel=1e-5)
    assert (found["tokens"], found["loss"]) == (len(tokens), pytest.approx(nats / len(tokens), rel=1e-5))
    first = text_file("bytes:x", TEXT, loaded, scorer, limit=1)
    assert first["loss"] == pytest.approx(-by_rows(loaded.model, tokens[:64], 256, 64, 32) / 64, rel=1e-5)
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))  # of these bytes, not of all


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tp=2)], ids=["one", "eight"])
def test_stories_equal_the_evaluation_of_the_run(mesh, made):
    mesh = make_mesh(mesh)
    found = stories(load(made.run, mesh=mesh), mesh, batch_size=4)
    said = rows(made.run, "eval.jsonl")[-1]
    assert said["step"] == CONFIG.train.total_steps
    for name in ("loss", "bits_per_byte", "accuracy"):
        assert found[name] == pytest.approx(said[f"eval/{name}"], rel=1e-5)
    floor = json.loads((made.run / "run.json").read_text())["floor"]["nats_per_token"]
    assert found["floor"] == floor
    assert found["ratio"] == pytest.approx(found["loss"] / floor)


def test_padding_to_whole_blocks_does_not_change_scores():
    """Padding to whole blocks and to longer sequences does not change the scores."""
    cfg, mesh = dataclasses.replace(small.nash_config().model, layers=1, residual="plain"), make_mesh(MeshConfig())
    model = jax.device_put(small.generic_model(cfg))
    scorer = Scorer(model, mesh, longest=21, batch_size=3, dtype="float32")
    rng = np.random.default_rng(0)
    lengths = [(1, 1), (3, 5), (30, 4), (9, 12), (1, 21), (20, 1), (2, 2)]
    requests = [Request(*(rng.integers(0, 256, n).tolist() for n in pair)) for pair in lengths]
    for request, score in zip(requests, scorer.score(requests), strict=True):
        tokens = (request.context + request.continuation)[-22:]
        logits = log_softmax(model, tokens[:-1], 21)
        last = len(request.continuation)
        wanted = sum(logits[len(tokens) - 1 - last + i, t] for i, t in enumerate(request.continuation))
        assert score.log_prob == pytest.approx(wanted, abs=1e-4)
        assert score.is_greedy == (logits[-last:].argmax(-1) == request.continuation).all()


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tp=2)], ids=["one", "eight"])
def test_chunked_log_probs_equal_those_of_all_logits(mesh):
    rng = np.random.default_rng(1)
    x_BTD, w_VD = rng.normal(size=(4, 12, 8)).astype(np.float32), rng.normal(size=(40, 8)).astype(np.float32)
    w_VD[33:] = 9 * w_VD[:7]  # padding, which would win
    likely_D = 9 * w_VD[3]
    w_VD[[3, 7, 27]] = likely_D  # always alike, the last of them on another device
    x_BTD[0] = likely_D
    random_BT = rng.integers(0, 33, (4, 12), np.int32)
    best_BT = np.argmax(np.einsum("btd,vd->btv", x_BTD, w_VD[:33]), axis=-1).astype(np.int32)
    assert (best_BT[0] == 3).all()
    with jax.set_mesh(make_mesh(mesh)):
        found = jax.jit(sharded_log_probs, static_argnums=3)
        plain = jax.jit(functools.partial(log_probs_reference, vocab_size=33))
        for targets_BT in (random_BT, best_BT, np.full_like(best_BT, 7), np.full_like(best_BT, 27)):
            got, wanted = found(x_BTD, w_VD, targets_BT, 33), plain(x_BTD, w_VD, targets_BT)
            np.testing.assert_allclose(got.log_prob_BT, wanted.log_prob_BT, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(got.is_best_BT, wanted.is_best_BT)


def test_the_begin_token_of_a_tokenizer_is_added(tmp_path):
    """The token before an empty prompt is that of lm-eval."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = save(tmp_path / "llama", KINDS["llama"])
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<|begin|>"])
    inner.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 257)])
    inner.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|begin|>"}))
    pairs = [("", "Tea"), ("Cold ", "tea"), ("<|begin|>Hot", " tea"), ("<|endoftext|>So", " it is"), ("x" * 300, " end")]
    requests = [SimpleNamespace(args=pair) for pair in pairs]
    model, other = ours(folder), by_lm_eval(folder)
    assert model.tok_encode("a") == [257, 97] == other.tok_encode("a")
    got, wanted = model.loglikelihood(requests), other.loglikelihood(requests, disable_tqdm=True)
    for (a, greedy), (b, also) in zip(got, wanted, strict=True):
        assert (a, greedy) == (pytest.approx(b, abs=1e-3), also)
    rolling = [SimpleNamespace(args=("So it is. " * 20,))]
    wanted = other.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert model.loglikelihood_rolling(rolling) == pytest.approx(wanted, abs=1e-3)


def test_a_task_in_a_group_runs_once(made, tmp_path):
    """By folder, by the group's file, or by the name of a task of lm-eval."""
    for file in made.tasks.glob("*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "group.yaml").write_text(yaml.dump({"group": "ours", "task": ["our_choice", "our_writing"]}))
    (tmp_path / "base.yaml").write_text("test_split: test\n")  # for others to include, and no task
    for name in (tmp_path, tmp_path / "group.yaml"):
        (task,) = load_tasks([str(name)])
        assert [part.name for part in task.parts] == ["ours"]
        assert sorted(part.task_name for part in task.parts[0].get_all_tasks()) == ["our_choice", "our_writing"]
    _, (file,) = _by_name("arc_easy")
    assert file.endswith("arc_easy.yaml")  # found without reading all of them


def call(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["evaluate", *map(str, argv)])
    return command.main()


def test_the_command_prints_a_table_and_writes_json(made, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    names = f"{made.tasks / 'choice.yaml'},stories,bytes:text.txt"
    assert call(monkeypatch, made.run, "--tasks", names, "--limit", 2, "--num-fewshot", 1, "--json", "found.json") == 0
    shown, said = capfd.readouterr()
    lines = [line.split() for line in shown.splitlines()]
    assert ["task", "metric", "value", "stderr"] in lines
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found["tasks"]) == ["our_choice", "stories", "bytes:text.txt"]
    accuracy = found["tasks"]["our_choice"]["acc"]
    assert ["our_choice", "acc", f"{accuracy['value']:.4f}", f"{accuracy['stderr']:.4f}"] in lines
    assert found["lm_eval"][str(made.tasks / "choice.yaml")]["n-samples"]["our_choice"]["effective"] == 2
    assert found["lm_eval"][str(made.tasks / "choice.yaml")]["n-shot"]["our_choice"] == 1
    assert found["tasks"]["bytes:text.txt"]["tokens"]["value"] == 64 + 33
    assert "64 tokens" in said
    assert "it/s" not in said  # bars of lm-eval's own
    assert "git" not in said  # which it asks for its version
    # A model from elsewhere, the same one: by the same command, the same figures.
    names = names.replace("stories,", "")
    assert call(monkeypatch, made.exported, "--tasks", names, "--limit", 2, "--num-fewshot", 1, "--json", "again.json") == 0
    again = json.loads((tmp_path / "again.json").read_text())["tasks"]
    flat = lambda tasks: {(t, m): pair["value"] for t, metrics in tasks.items() for m, pair in metrics.items() if t in again}
    assert flat(again) == pytest.approx(flat(found["tasks"]), rel=1e-4)


def test_out_of_memory_is_one_line_after_the_results_so_far(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name * 50)
    score = Scorer.score

    def scarce(self, requests, *rest):
        if requests[0].continuation[0] == ord("b"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
        return score(self, requests, *rest)

    monkeypatch.setattr(Scorer, "score", scarce)
    with pytest.raises(ConfigError, match=r"memory; try --batch-size 4, or .* --mesh-fsdp"):
        call(monkeypatch, made.run, "--tasks", "bytes:a,bytes:b")
    assert "bytes:a  bits_per_byte" in capsys.readouterr().out


@pytest.mark.parametrize(("tasks_", "said"), [
    ("hellaswagg", "lm-eval has no task of this name.*did you mean hellaswag?"),
    ("storys", "did you mean stories?"),
    ("nowhere/task.yaml", "no such file or folder"),
    ("bytes:nothing.txt", "cannot be read"),
    ("bytes:broken.txt", "is not UTF-8 text"),
    ("broken.yaml", "broken.yaml: not a readable lm-eval task"),
    ("nameless.yaml", "it has no `task:` with a name"),
    ("without_data.yaml", "cannot be loaded"),
    ("with_a_typo.yaml", "cannot be loaded .*q_estion"),
    ("sometimes_wrong.yaml", "lm-eval could not run it .*no element 2"),
    ("empty", "the folder has no .yaml file"),
    ("both", "both/broken.yaml: not a readable lm-eval task"),
    ("", "--tasks stories"),
])  # fmt: skip
def test_a_wrong_name_is_one_line(tasks_, said, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load((made.tasks / "choice.yaml").read_text())
    (tmp_path / "broken.txt").write_bytes(b"ab\xff")
    (tmp_path / "broken.yaml").write_text("task: [a\n")
    (tmp_path / "nameless.yaml").write_text("dataset_path: json\n")
    gone = {"data_files": {"test": str(tmp_path / "gone.jsonl")}}
    (tmp_path / "without_data.yaml").write_text(yaml.dump(values | {"dataset_kwargs": gone}))
    (tmp_path / "with_a_typo.yaml").write_text(yaml.dump(values | {"doc_to_text": "{{q_estion.text}}"}))
    (tmp_path / "sometimes_wrong.yaml").write_text(yaml.dump(values | {"doc_to_text": "{{choices[2].upper()}}"}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "broken.yaml").write_text("task: [a\n")
    (tmp_path / "both" / "good.yaml").write_text(yaml.dump(values))
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        call(monkeypatch, made.run, "--tasks", tasks_)


def test_other_mistakes_are_one_line(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        call(monkeypatch, "nowhere", "--tasks", "stories")
    with pytest.raises(ConfigError, match="--batch-size 3 cannot be split over data x fsdp = 2"):
        call(monkeypatch, made.run, "--tasks", "stories", "--batch-size", 3, "--mesh-data", 2)
    with pytest.raises(ConfigError, match=r"unknown flag --limits; did you mean --limit\?"):
        call(monkeypatch, made.run, "--tasks", "stories", "--limits", 3)
    with pytest.raises(ConfigError, match=r"--json no/such.json: .*existing folder"):
        call(monkeypatch, made.run, "--tasks", "stories", "--json", "no/such.json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'nash_mhc\[eval\]'"):
        call(monkeypatch, made.run, "--tasks", "arc_easy")
