"""An experiment small enough for two CPU cores: arithmetic chains, a tiny student and tiny teachers.

`task` (problems, textbooks, grader) is pure Python and is all that a grading process imports. `tokenizer`, `models`,
`sft` and `generate` need transformers and torch. `build` makes the whole folder; `python -m distilled_rl.miniature` is
its command line.
"""
