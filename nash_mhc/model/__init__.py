from nash_mhc.model.lm import LM as LM
