"""Prompts answered by DeepSeek-R1-Distill-Qwen-7B, as ARES describes them (section 2 and table 2).

| | mean | sd | P50 | P90 | P95 |
|---|---|---|---|---|---|
| ShareGPT, prompt | 305 | 1053 | 36 | 920 | 1609 |
| ShareGPT, output | 7542 | 12008 | 1536 | 32670 | 32679 |
| Alpaca, prompt | 11 | 4 | 10 | 15 | 18 |
| Alpaca, output | 8596 | 13354 | 987 | 32690 | 32691 |

Of ShareGPT's outputs 29.2% are below 1,000 tokens and 17.3% above 30,000; all have at most 32K.

The quantiles above are ARES's. The others (first, last, P70, the prompts' P99; all others of Alpaca's) are
not published: they are chosen so that the means and deviations come out as published. For Alpaca that leaves
little choice: nearly a quarter of the outputs must run to the 32K limit. Prompt and output are drawn
independently. ARES does not say how much of the output is reasoning, and its scheduler does not ask: all of
it counts as answer.
"""

from __future__ import annotations

from simulator.workloads.lengths import QuantileLengths, QuantileTable

SHAREGPT = QuantileLengths(
    prompt=QuantileTable(
        shares=(0.0, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0),
        values=(4, 36, 90, 920, 1609, 1960, 21500),
    ),
    output=QuantileTable(
        shares=(0.0, 0.292, 0.5, 0.7, 0.827, 0.9, 0.95, 1.0),
        values=(64, 1000, 1536, 1876, 30000, 32670, 32679, 32700),
    ),
)
ALPACA = QuantileLengths(
    prompt=QuantileTable(
        shares=(0.0, 0.5, 0.9, 0.95, 0.99, 1.0),
        values=(6, 10, 15, 18, 24, 45),
    ),
    output=QuantileTable(
        shares=(0.0, 0.5, 0.76, 0.77, 0.9, 0.95, 1.0),
        values=(64, 987, 6404, 32600, 32690, 32691, 32700),
    ),
)
