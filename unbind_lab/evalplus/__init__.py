"""HumanEval+ and MBPP+ as EvalPlus 0.3.1 judges them (arXiv 2305.01210): the files, what counts of an answer, the comparison."""
