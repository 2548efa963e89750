"""`python -m nash_mhc.train`: flags, YAML and key=value -> a training run."""

from __future__ import annotations

import sys

from nash_mhc.config.cli import parse, render
from nash_mhc.config.commands import one_line_errors
from nash_mhc.train.run import next_commands, resolve, run


def main() -> int:
    parsed = parse(sys.argv[1:], prog="python -m nash_mhc.train")
    if parsed.print_config:
        config, _ = resolve(parsed.config)
        before, after = parsed.config.to_dict(), config.to_dict()
        origins = dict(parsed.origins)
        for section, values in after.items():
            if isinstance(values, dict):
                changed = {f"{section}.{k}" for k, v in values.items() if before[section][k] != v}
                origins |= {k: f"{origins[k]}, resolved here" for k in changed}
        print(render(config, origins), end="")
        return 0
    print(next_commands(run(parsed.config), sys.argv[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(one_line_errors(main))
