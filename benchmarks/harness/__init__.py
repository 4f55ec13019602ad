"""Modules that the benchmark commands share.

A *contender* is an optimizer, bare or in a wrapper, that a benchmark compares with others; some contenders are
yardsticks, such as a copy of all gradients. A *cell* is a kind of step: shapes, optimizer, type of the gradients and so
on. In a *round*, each contender has one *turn*: it takes one or more steps, which are timed. Ratios compare turns of
the same round, so that a change of the machine's load affects both times.
"""
