"""vLLM's side of ``unbind bench serve --vllm``: run by a Python that has vLLM, and so imports nothing of this project.

The first line on stdin is ``{"model": folder, "length": n, "requests": n, "dtype": name}``, answered by ``{"ready": version}``.
Each further line, ``{"prompts": [[id, ...], ...], "new": n}``, is answered by ``{"made": [n, ...]}`` once all tokens are there.
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever logs to stdout from now on must not get between the answers
    job = json.loads(sys.stdin.readline())
    vllm = importlib.import_module("vllm")  # of the Python that runs this, not of the project's

    engine = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=job["length"],
        max_num_seqs=job["requests"],
        enforce_eager=True,
        disable_log_stats=True,
    )
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(temperature=0, max_tokens=asked["new"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"made": made}), file=answers, flush=True)


if __name__ == "__main__":
    main()
