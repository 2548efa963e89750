"""What a run reads: the keys of its data. No jax, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, key

TEMPLATE = "{role}: {content}\n"  # of a message, where none is given
TOKENIZER = "tokenizer"  # as the template: the tokenizer's own


@dataclass(frozen=True)
class DataConfig(Section):
    section = "data"

    dataset: str = key(
        "stories",
        "'stories' (built in, endless, known entropy), puzzles (sudoku4, sudoku9, maze), a prepared folder, a text, .jsonl or "
        ".parquet file (.gz, .zst), a folder or glob of them, or a Hugging Face dataset; with a weight (a:0.7) it can be given "
        "several times, for a mixture",
        weighted=True,
        path=True,
    )
    dataset_name: str | None = key(None, "variant of a Hugging Face dataset, where it has several")
    split: str = key("train", "split to train on")
    eval_split: str = key("validation", "split to evaluate on, never trained on")
    validation_fraction: float = key(
        0.05, "share of the documents to hold out where the data has no eval split (0: none)", low=0, high=0.9
    )
    text_field: str = key("text", "field of a JSON line or column of a table that holds the text")
    extensions: str | None = key(None, "endings of the files of a folder to read, such as .md,.py (none: text and data)")
    format: str = key(
        "auto",
        "what a record is: plain text, prompt and response, chat, fields that templates name, or a puzzle (a CSV file); auto "
        "tells by the first one",
        choices=("auto", "text", "prompt", "chat", "fields", "puzzle"),
    )
    template: str | None = key(
        None, "how a message of prompt or chat data is written, with {role} and {content}; tokenizer: by its chat template"
    )
    loss_on: str = key("response", "what counts in the loss of prompt and chat data", choices=("response", "all"))
    prompt_template: str | None = key(
        None, r"what --format fields asks, such as 'Q: {question}[\nHint: {hint}]\n': [ ] vanishes without its field",
        further="tuning",
    )  # fmt: skip
    response_template: str | None = key(None, "what --format fields answers, likewise; only this counts", further="tuning")
    test_fraction: float = key(
        0.0, "share of the documents for a test at the end, never trained or evaluated on", low=0, high=0.9, further="tuning"
    )
    test_split: str | None = key(
        None, "the data's own split for that test (none: `test`, where there is a --test-fraction)", further="tuning"
    )
    max_documents: int | None = key(None, "read no more documents than this (none: all)", low=1)
    tokenizer: str = key("bytes", "'bytes' (built in), a tokenizer.json, a folder with one, or a Hugging Face name", path=True)
    begin_with_end: bool = key(
        True,
        "begin documents with the end token where the tokenizer puts no begin token in front of a text; false with the "
        "tokenizer of a Hugging Face model's folder",
        further="tuning",
    )
    streaming: bool = key(False, "pack rows while training instead of preparing them first")
    cache_dir: str = key(".cache/data", "folder that datasets are prepared in, each once", path=True)
    batch_size: int = key(8, "rows of one forward pass over all devices; a step reads batch-size x grad-accum rows", low=1)
    seq_len: int = key(256, "tokens in a row (T)", low=2)
    num_workers: int = key(0, "processes that prepare rows (0: threads of this process)", low=0, high=256)
    worker_buffer_size: int = key(4, "batches each worker prepares ahead", low=1, high=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        templates = {"--prompt-template": self.prompt_template, "--response-template": self.response_template}
        if self.format == "fields":
            if missing := [flag for flag, template in templates.items() if template is None]:
                raise ConfigError(
                    f"--format fields: {missing[0]} is missing; write it with fields of a record, as {{question}}"
                )
            if self.template not in (None, TOKENIZER):
                raise ConfigError(
                    "--format fields has --prompt-template and --response-template; leave out --template, or use "
                    f"--template {TOKENIZER}"
                )
        elif given := [flag for flag, template in templates.items() if template is not None]:
            raise ConfigError(f"{given[0]} is for --format fields; add that, or leave the template out")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ConfigError(
                f"--validation-fraction {self.validation_fraction:g} and --test-fraction {self.test_fraction:g} leave nothing "
                "to train on; lower one of them"
            )

    @property
    def test_part(self) -> str | None:
        """The name of the test part; None where none is asked for."""
        return self.test_split or ("test" if self.test_fraction else None)
