"""Keys of the data of a run. No jax, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from nash_mhc.config.fields import ConfigError, Section, key

TEMPLATE = "{role}: {content}\n"  # default template of a message
TOKENIZER = "tokenizer"  # value of --template: the tokenizer's chat template


@dataclass(frozen=True)
class DataConfig(Section):
    section = "data"

    dataset: str = key(
        "stories",
        "stories (built in), a prepared folder, text, .jsonl or .parquet files (.gz, .zst), a folder or glob of "
        "them, or a Hugging Face dataset; repeat with weights (a:0.7) for a mixture",
        seam="sources",
        weighted=True,
        path=True,
    )
    dataset_name: str | None = key(None, "variant of a Hugging Face dataset")
    split: str = key("train", "split to train on")
    eval_split: str = key("validation", "split to evaluate on, never trained on")
    validation_fraction: float = key(
        0.05, "share of the documents to hold out if the data has no evaluation split (0: none)", low=0, high=0.9
    )
    text_field: str = key("text", "JSON field or table column that holds the text")
    extensions: str | None = key(None, "extensions of files to read from a folder, such as .md,.py (none: text and data files)")
    format: str = key(
        "auto",
        "format of a record: text, prompt and response, chat, fields used by templates, or puzzle (CSV); auto "
        "decides by the first record",
        choices=("auto", "text", "prompt", "chat", "fields", "puzzle"),
    )
    template: str | None = key(
        None, "template of a message, with {role} and {content}; `tokenizer`: the tokenizer's chat template"
    )
    loss_on: str = key("response", "tokens that count in the loss of prompt and chat data", choices=("response", "all"))
    prompt_template: str | None = key(
        None, r"prompt of --format fields, such as 'Q: {question}[\nHint: {hint}]\n'; a part in [ ] is dropped if its "
            r"field is missing",
        further="tuning",
    )  # fmt: skip
    response_template: str | None = key(
        None, "response of --format fields, in the same form; only this part counts in the loss", further="tuning"
    )
    test_fraction: float = key(
        0.0, "share of the documents for a final test, never trained or evaluated on", low=0, high=0.9, further="tuning"
    )
    test_split: str | None = key(
        None, "existing split for the final test (none: `test`, if --test-fraction is set)", further="tuning"
    )
    max_documents: int | None = key(None, "read at most this many documents (none: all)", low=1)
    tokenizer: str = key("bytes", "bytes (built in), a tokenizer.json, a folder with one, or a Hugging Face name", path=True)
    begin_with_end: bool = key(
        True,
        "begin documents with the end token if the tokenizer adds no begin token; false for the tokenizer of a "
        "Hugging Face model",
        further="tuning",
    )
    streaming: bool = key(False, "pack sequences while training instead of preparing them first")
    cache_dir: str = key(".cache/data", "folder for prepared datasets", path=True)
    batch_size: int = key(8, "sequences per forward pass over all devices; a step has batch-size x grad-accum", low=1)
    seq_len: int = key(256, "tokens per sequence (T)", low=2)
    num_workers: int = key(0, "worker processes for the input pipeline (0: threads)", low=0, high=256)
    worker_buffer_size: int = key(4, "batches that each worker prepares ahead", low=1, high=4096)

    def __post_init__(self) -> None:
        super().__post_init__()
        templates = {"--prompt-template": self.prompt_template, "--response-template": self.response_template}
        if self.format == "fields":
            if missing := [flag for flag, template in templates.items() if template is None]:
                raise ConfigError(
                    f"--format fields needs {missing[0]}; write it with the fields of a record, such as {{question}}"
                )
            if self.template not in (None, TOKENIZER):
                raise ConfigError(
                    f"--format fields uses --prompt-template and --response-template, not --template {self.template}; "
                    f"leave --template out, or use --template {TOKENIZER}"
                )
        elif given := [flag for flag, template in templates.items() if template is not None]:
            raise ConfigError(f"{given[0]} needs --format fields; add it, or leave the template out")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ConfigError(
                f"--validation-fraction {self.validation_fraction:g} and --test-fraction {self.test_fraction:g} leave no "
                "documents to train on; lower one of them"
            )

    @property
    def test_part(self) -> str | None:
        """Return the name of the test split, or None."""
        return self.test_split or ("test" if self.test_fraction else None)
