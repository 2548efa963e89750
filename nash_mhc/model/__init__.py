"""The models.

Letters in array names: B batch, T time, D width, N query heads, K key and value heads, H head size, F MLP width, V
vocabulary, L layers, R residual streams, M coefficients of a stream's maps, C scales, I blocks of a scale, J taps, U
padded time.
"""

from nash_mhc.model.lm import LM as LM
