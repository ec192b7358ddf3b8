"""Lengths of the requests of PASCAL's experiments (HPCA'26), as far as the paper specifies them."""

from __future__ import annotations

from functools import partial

import numpy as np

from simulator.workloads.lengths import Lengths, blend, lognormal, lognormal_of_mean, tokens

MAX_REASONING_TOKENS = 32_768


def alpaca_eval(count: int, rng: np.random.Generator) -> Lengths:
    """AlpacaEval 2.0 prompts to a reasoning model, as far as PASCAL says what they were (HPCA'26, section V).

    PASCAL's lengths are those of o4-mini's answers and were not released; its figure 8 shows them without
    numbers. What is known or taken here:

    - reasoning: lognormal. More than 70% of requests below 1,000 tokens (figure 10): 75% taken. The 99th
      percentile of KV transfers took 0.14 s (section V-C), which at 100 Gbit/s and 262,144 bytes a token is
      6,676 tokens if nothing else is on the link: four fifths of it, 5,300 tokens, taken for P99. Both
      together: median 506.
    - answer: lognormal of mean 455: AlpacaEval's leaderboard gives 2,049 characters on average for its
      reference model (gpt4_1106_preview), at 4.5 characters a token. Its spread (sigma 0.6) is an assumption.
    - prompt: lognormal of mean 42: 136,100 bytes in 805 instructions, at 4 bytes a token; its spread is an
      assumption.

    The three are drawn independently, which is an assumption too. Reasoning ends at 32,768 tokens,
    DeepSeek-R1's limit.
    """
    prompt = lognormal(median=27, p99=240, count=count, rng=rng)
    reasoning = lognormal(median=506, p99=5_300, count=count, rng=rng)
    answer = lognormal_of_mean(455, sigma=0.6, count=count, rng=rng)
    return Lengths(tokens(prompt), tokens(np.minimum(reasoning, MAX_REASONING_TOKENS)), tokens(answer))


def arena_hard(count: int, rng: np.random.Generator) -> Lengths:
    """Arena-Hard prompts to a reasoning model, as far as PASCAL says what they were (HPCA'26, section V).

    Derived like `alpaca_eval`, from:

    - reasoning: lognormal. More than 70% of requests below 1,000 tokens (figure 10): 71% taken. P99 of KV
      transfers 0.25 s (section V-C), 11,920 tokens on an empty link: four fifths of it, 9,500 tokens, taken
      for P99. Both together: median 496.
    - answer: lognormal of mean 668, what Arena-Hard's leaderboard of 2024-07-31 gives for gpt-4o-mini; the
      other chat models there have 480 to 720. Its spread (sigma 0.6) is an assumption.
    - prompt: lognormal of mean 100: 500 questions in 283,456 characters, of which about 165 each are not the
      question, at 4 characters a token; its spread is an assumption.

    The three are drawn independently, which is an assumption too. Reasoning ends at 32,768 tokens,
    DeepSeek-R1's limit.
    """
    prompt = lognormal(median=50, p99=777, count=count, rng=rng)
    reasoning = lognormal(median=496, p99=9_500, count=count, rng=rng)
    answer = lognormal_of_mean(668, sigma=0.6, count=count, rng=rng)
    return Lengths(tokens(prompt), tokens(np.minimum(reasoning, MAX_REASONING_TOKENS)), tokens(answer))


def _problems(
    prompt_mean: float, reasoning_mean: float, answer_mean: float, count: int, rng: np.random.Generator
) -> Lengths:
    """Draw lognormal lengths with these means; sigma is 0.6 for prompts and answers, 0.8 for reasoning."""
    prompt = lognormal_of_mean(prompt_mean, 0.6, count, rng)
    reasoning = lognormal_of_mean(reasoning_mean, 0.8, count, rng)
    answer = lognormal_of_mean(answer_mean, 0.6, count, rng)
    return Lengths(tokens(prompt), tokens(np.minimum(reasoning, MAX_REASONING_TOKENS)), tokens(answer))


math_500 = partial(_problems, 75.0, 1_100.0, 350.0)


gpqa = partial(_problems, 200.0, 2_600.0, 430.0)


live_code_bench = partial(_problems, 500.0, 5_100.0, 5_100.0 / 8.48)


def math_gpqa_lcb(count: int, rng: np.random.Generator) -> Lengths:
    """Problems with long reasoning and short answers: MATH-500, GPQA and LiveCodeBench in equal shares.

    For PASCAL's figures 14 and 16 (HPCA'26, section V-D). The paper says only that "the number of reasoning
    tokens can reach as much as 8.48x" that of answering tokens; this is taken as the ratio of the means of
    LiveCodeBench, the one with the longest reasoning. Everything else is an assumption, in the order that the
    three are known for: prompts of about 75, 200 and 500 tokens; reasoning of mean 1,100, 2,600 and 5,100
    tokens; answers of mean 350, 430 and 601.
    """
    return blend([(1 / 3, math_500), (1 / 3, gpqa), (1 / 3, live_code_bench)], count, rng)


def arena_hard_mixed(count: int, rng: np.random.Generator) -> Lengths:
    """Half Arena-Hard, half problems with long reasoning: PASCAL's figure 16 (HPCA'26, section V-D)."""
    return blend([(0.5, arena_hard), (0.5, math_gpqa_lcb)], count, rng)


def reasoning_phase(count: int, rng: np.random.Generator) -> Lengths:
    """The reasoning phase alone: PASCAL's characterisation on one GPU (HPCA'26, section III-A, figure 4).

    Prompts of 128 tokens; reasoning "randomly selected between 128 and 2048 tokens". The figure shows single
    lengths, so they are drawn from the multiples of 128 with equal probability. The answer, which the figure
    leaves out, is one token. The paper runs 300 requests; their rate is not given.
    """
    reasoning = 128 * rng.integers(1, 17, size=count)
    return Lengths(np.full(count, 128), reasoning, np.ones(count, np.int64))


def answering_phase(count: int, rng: np.random.Generator) -> Lengths:
    """The answering phase alone: PASCAL's characterisation on one GPU (HPCA'26, section III-A, figure 5).

    Prompt and reasoning together are 128 tokens, and their KV exists when the experiment begins; answers have
    128 to 2048 tokens, drawn from the multiples of 128 as in `reasoning_phase`. Here the 128 tokens are a
    prompt that is still to be prefilled, which takes some milliseconds. The paper runs 300 requests; their
    rate is not given.
    """
    answer = 128 * rng.integers(1, 17, size=count)
    return Lengths(np.full(count, 128), np.zeros(count, np.int64), answer)
