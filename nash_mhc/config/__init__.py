from nash_mhc.config import presets as presets
from nash_mhc.config.schema import ConfigError as ConfigError
from nash_mhc.config.schema import ModelConfig as ModelConfig
from nash_mhc.config.schema import RunConfig as RunConfig
