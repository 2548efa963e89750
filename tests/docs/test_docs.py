"""The documentation: the site builds without a warning, no link leads nowhere, every command of its pages is one."""

import contextlib
import itertools
import math
import re
import sys
from pathlib import Path

import jax
import pytest
import site_pages
from site_pages import PAGES, ROOT, Command

from nash_mhc.bench import __main__ as bench
from nash_mhc.bench import corpus
from nash_mhc.checkpoint import __main__ as checkpoint
from nash_mhc.config import parsing, reference
from nash_mhc.config.schema import ConfigError
from nash_mhc.data import __main__ as data
from nash_mhc.doctor import __main__ as doctor
from nash_mhc.evaluate import __main__ as evaluate
from nash_mhc.generate import __main__ as generate
from nash_mhc.kits.distill import command as distill
from nash_mhc.kits.distill.chain import read_chain
from nash_mhc.kits.hub import command as hub
from nash_mhc.parallel.mesh import check_fit
from nash_mhc.parallel.params import named_leaves
from nash_mhc.parallel.sharding import RULES, logical_axes
from nash_mhc.plan import __main__ as plan
from nash_mhc.report import __main__ as report
from nash_mhc.train import __main__ as train
from nash_mhc.train.inputs import resolve
from nash_mhc.train.state import abstract_state, sharded_abstract_state

# The test that really runs a command of each kind, with a small model, on this machine.
RUN_BY = {
    "nash_mhc": "test_first_hour.py::test_the_package_itself_says_what_there_is_and_its_version",
    "train": "test_first_hour.py::test_every_command_that_is_printed_runs_as_it_stands",
    "train --print-config": "test_first_hour.py::test_a_reader_that_has_seen_enough_is_no_error",
    "train --help": "test_first_hour.py::test_a_reader_that_has_seen_enough_is_no_error",
    "data prepare": "test_first_hour.py::test_every_command_that_is_printed_runs_as_it_stands",
    "data train-bpe": "test_first_hour.py::test_every_command_that_is_printed_runs_as_it_stands",
    "data questions": "test_tuning.py::test_recipes_run",
    "data inspect": "test_inspect.py::test_statistics_of_a_prepared_folder",
    "checkpoint list": "test_checkpoint_command.py::test_list_shows_every_checkpoint_including_damaged_ones",
    "checkpoint inspect": "test_checkpoint_command.py::test_one_device_inspects_a_checkpoint_of_eight",
    "checkpoint verify": "test_first_hour.py::test_the_console_script_is_every_command",
    "generate": "test_first_hour.py::test_every_command_that_is_printed_runs_as_it_stands",
    "hub import": "test_hub_import.py::test_import_and_export_preserve_the_files",
    "hub export": "test_hub_import.py::test_import_and_export_preserve_the_files",
    "hub pack": "test_distill.py::test_a_chain_resumes",
    "distill cache": "test_distill.py::test_a_chain_resumes",
    "distill chain": "test_distill.py::test_a_chain_resumes",
    "hub merge": "test_adapters.py::test_peft_adapters_import_export_and_merge",
    "hub check": "test_hub_import.py::test_check_prints_the_difference_of_two_models",
    "evaluate": "test_evaluate.py::test_the_command_prints_a_table_and_writes_json",
    "plan": "test_plan.py::test_the_command_of_the_winner_is_one_that_train_takes",
    "report": "test_first_hour.py::test_every_command_that_is_printed_runs_as_it_stands",
    "report --live": "test_report.py::test_the_live_command_serves_until_it_is_interrupted",
    "doctor": "test_doctor.py::test_a_healthy_machine_is_found_to_be_so",
    "bench step": "test_bench.py::test_figures_follow_from_one_another",
    "bench parts": "test_bench_parts.py::test_figures_follow_from_one_another",
    "bench kernels": "test_bench_kernels.py::test_every_kernel_of_a_step_meets_its_plain_form_and_a_wrong_one_is_named",
    "bench compile": "test_bench.py::test_compiling_for_a_topology_reports_memory_and_collectives",
    "bench quality": "test_bench.py::test_the_comparison_as_json_and_as_a_table",
    "bench corpus": "test_bench_corpus.py::test_a_corpus_has_every_text_once_by_its_kind_and_is_the_same_every_time",
    "config.reference": "test_docs.py::test_the_page_of_all_keys_is_the_one_that_the_declarations_make",
    # What the targets of the Makefile run; that they are there is asked below.
    "make train": "test_first_hour.py::test_every_command_that_is_printed_runs_as_it_stands",
    "make test": "test_docs.py",
    "make docs": "test_docs.py::test_no_link_of_the_site_leads_nowhere",
}
COMMANDS = [command for page in PAGES for command in site_pages.commands(page)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site_pages.build(folder)
    return folder


def test_no_link_of_the_site_leads_nowhere(site: Path) -> None:
    broken, elsewhere = site_pages.broken_links(site)
    assert not broken, "\n".join(broken)
    assert elsewhere < 200  # to other sites, which are not followed: few, for they go stale
    assert {page.with_suffix(".html").name for page in PAGES[1:]} <= {page.name for page in site.glob("*.html")}


def test_pages_look_as_on_github_and_need_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES[1:]:
        text, shown = page.read_text(), (site / page.with_suffix(".html").name).read_text()
        fetched = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]*)"', shown)
        assert not fetched, page.name
        assert "arithmatex" not in shown, page.name  # a formula that was left as it stands
        languages = re.findall(r"^```(\w*)\n.*?^```$", text, re.MULTILINE | re.DOTALL)
        outside = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)  # of code
        formulas = languages.count("math")
        assert shown.count("<pre>") == len(languages) - formulas, page.name
        assert shown.count("<math") == formulas + len(re.findall(r"\$[^$]+\$", outside)), page.name
        assert not re.search(r"<p>[^<]*\n(?:[-*]|\d+\.) ", shown), page.name  # a list that became a paragraph


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_no_link_beside_the_site_leads_nowhere(page: Path) -> None:
    for link in site_pages.links_of_markdown(page):
        assert link.startswith("https://") or (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_lines_of_prose_are_as_wide_as_those_of_the_code(page: Path) -> None:
    """Tables, pictures and code are as wide as they have to be."""
    outside = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in outside.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "!["))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_wrapped_line_becomes_a_bullet(page: Path) -> None:
    """A line that goes on with `- 1)` after half a sentence would be shown as a bullet."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for before, line in itertools.pairwise(text.splitlines()):
        begins, ended = re.match(r"\s*([-*+]|\d+[.)])\s", line), re.search(r"[.:;!?)`>|*]$", before.rstrip())
        assert not begins or ended or not before.strip() or before.startswith("#"), f"{page.name}: {before!r}, then {line!r}"


def test_every_flag_command_and_recipe_is_documented() -> None:
    """Flags that commands declare, and all names that the documentation had before it was shortened."""
    text = "\n".join(page.read_text() for page in [*PAGES, ROOT / "README.md", ROOT / "docs" / "configuration.md"])
    declared = {
        flag
        for file in (ROOT / "nash_mhc").rglob("*.py")
        for flag in re.findall(r'add_argument\(\s*"(--[a-z-]+)"', file.read_text())
    }
    before = [line for line in (Path(__file__).parent / "documented.txt").read_text().splitlines() if not line.startswith("#")]
    missing = [name for name in sorted({*declared, *before}) if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]
    assert missing == []


def test_the_page_of_all_keys_is_the_one_that_the_declarations_make() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference.page(), f"a key has changed; run: {reference.COMMAND}"


def table(page: str, first: str) -> list[list[str]]:
    """The cells of the rows of the table whose head begins with `first`, without backticks."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[head + 2 :])
    return [[cell.strip().replace("`", "") for cell in row.strip("|").split("|")] for row in rows]


def test_the_tables_of_the_page_about_sharding_are_what_the_code_does() -> None:
    config, mesh = resolve(parsing.parse("--mesh-data 2 --mesh-fsdp 2 --mesh-tp 2".split()).config)
    model = sharded_abstract_state(config, mesh).model
    x = lambda shape: " x ".join(map(str, shape))
    written = {row[0]: (row[1], row[4]) for row in table("sharding.md", "parameter")}
    found = named_leaves(model).items()
    assert written == {name: (x(leaf.shape), x(leaf.sharding.shard_shape(leaf.shape))) for name, leaf in found}
    axes = jax.tree.leaves(logical_axes(model), is_leaf=lambda names: isinstance(names, tuple))  # in the order of `found`
    for (name, _, over_fsdp, over_tp, _), names in zip(table("sharding.md", "parameter"), axes, strict=True):
        split = {RULES[axis]: axis for axis in names if RULES[axis]}
        assert (split.get(("fsdp",), "-"), split.get(("tp",), "-")) == (over_fsdp, over_tp), name
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for _, leaf in found)
    page = (ROOT / "docs" / "sharding.md").read_text()
    assert f"{held:,} of the {sum(leaf.size for _, leaf in found):,} parameters" in page
    rules = {
        axis: tuple(over.split(" x "))
        for what, over in table("sharding.md", "axis of an array")
        for axis in what.partition(":")[0].split(", ")
    }
    assert rules == {axis: over for axis, over in RULES.items() if over}
    assert all(f"`{axis}`" in page for axis in RULES)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_every_error_that_a_page_quotes_is_one_of_the_programs(page: Path) -> None:
    for line in site_pages.quoted_errors(page):
        own = re.sub(r"\([^()]{60,}\)", "(...)", line)  # without the long reason that a library gives
        assert site_pages.is_message(own), f"{page.name} quotes what nothing in nash_mhc/ says: {line}"


def test_every_command_is_run_by_a_test_or_says_what_it_needs() -> None:
    assert len(COMMANDS) > 80
    for command in COMMANDS:
        assert command.needs or command.kind in RUN_BY, (
            f"{command}\nname the test that runs `{command.kind}` in RUN_BY, or put <!-- needs: ... --> before the block"
        )
    made = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in COMMANDS:
        if command.kind.startswith("make "):
            assert command.kind.split()[1] in made, command


def test_the_tests_that_run_the_commands_are_there() -> None:
    used = {command.kind for command in COMMANDS}
    for kind, where in RUN_BY.items():
        file, _, name = where.partition("::")
        (found,) = (ROOT / "tests").rglob(file)
        assert not name or f"def {name}(" in found.read_text(), where
        assert kind in used, f"no page has a command of the kind {kind}: leave it out of RUN_BY"


def check(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ConfigError for a flag, a key or a value that the command does not take. Nothing is run."""
    module, _, _ = command.kind.partition(" ")
    words = command.arguments
    if command.kind == "make train":
        words = [word for given in words if given.startswith("ARGS=") for word in given[5:].split()]
    if module == "train" or command.kind == "make train":
        parsed = parsing.parse(words, own=train._own_flags, folder="train.checkpoint_dir")
        config, given = parsed.config, parsed.given
        if -1 not in config.mesh.axes.values():
            check_fit(config.data, config.model, config.mesh.axes)
        if {"optim.freeze", "optim.train_only", "optim.optimizer"} & set(given):
            abstract_state(config)  # whether there are such parameters, and such an optimizer
    elif command.kind in (
        "data prepare",
        "data train-bpe",
        "bench step",
        "bench parts",
        "bench kernels",
        "bench compile",
        "bench quality",
    ):
        monkeypatch.setattr(sys, "argv", [module, *words, "--print-config"])
        monkeypatch.setattr(bench, "_infer", parsing._nothing)
        {"data": data, "bench": bench}[module].main()
    elif command.kind == "data questions":
        monkeypatch.setattr(sys, "argv", [module, *words])
        data.main()
    elif module == "generate":
        generate.parse(words)
    elif module == "evaluate":
        evaluate.parse(words)
    elif module == "doctor":
        doctor.parse(words)
    elif module == "plan":
        parsing.parse(words, own=plan.own_flags)
    elif command.kind == "distill cache":
        parsing.parse(words[1:], own=distill.cache_flags)
    elif command.kind == "distill chain":
        read_chain(Path(words[1]), tmp_path)
    elif command.kind == "bench corpus":
        monkeypatch.setattr(corpus, "build", lambda out: {})
        corpus.command(words[1:])
    elif module in ("data", "checkpoint", "report", "hub"):  # they look at folders, which are not here
        monkeypatch.setattr(sys, "argv", [module, *words])
        with pytest.raises(ConfigError, match=r"no such folder|there is no|not there|no run|neither|config\.json"):
            {"data": data, "checkpoint": checkpoint, "report": report, "hub": hub}[module].main()
    else:
        assert module in ("nash_mhc", "config.reference", "make") or command.needs, command


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.where} {command.kind}")
def test_every_flag_and_key_of_a_command_exists(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("train: {seed: 1}\n")
    Path("notes").mkdir()
    Path("recipes").symlink_to(ROOT / "recipes")
    with contextlib.suppress(SystemExit):  # --help
        check(command, tmp_path, monkeypatch)
    assert "error" not in capsys.readouterr().err


def test_the_line_of_a_typical_guide_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = (
        "--dataset OWNER/NAME --dataset-name VARIANT --tokenizer OWNER/NAME --batch-size 32 "
        "--mesh-data 2 --mesh-fsdp 2 --mesh-tp 2 --checkpoint-dir ./checkpoints"
    )
    config = parsing.parse(line.split(), own=train._own_flags, folder="train.checkpoint_dir").config
    assert (config.data.dataset, config.data.dataset_name, config.data.tokenizer) == ("OWNER/NAME", "VARIANT", "OWNER/NAME")
    assert (config.data.batch_size, config.train.checkpoint_dir) == (32, "./checkpoints")
    check_fit(config.data, config.model, config.mesh.axes)
    # Without a network it ends with one line about what could not be had.
    monkeypatch.setattr(sys, "argv", ["train", *line.split()])
    with pytest.raises(ConfigError, match=r"--tokenizer OWNER/NAME: .*Hugging Face"):
        train.main()
    assert not list(tmp_path.iterdir())
