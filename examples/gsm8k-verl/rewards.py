"""A `compute_score` as verl's `custom_reward_function.path` names it, for word problems that end with `#### NUMBER`."""

import re


def extract_solution(solution_str, method):
    pattern = r"#### (-?\d[\d.,]*)" if method == "strict" else r"-?\d[\d.,]*"
    found = re.findall(pattern, solution_str)
    return found[-1].replace(",", "").rstrip(".") if found else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "example/word_problems":
        raise NotImplementedError(f"no reward for {data_source}")
    strict = extract_solution(solution_str, "strict")
    flexible = extract_solution(solution_str, "flexible")
    if strict == ground_truth:
        score = 1.0
    elif flexible == ground_truth:
        score = 0.5
    else:
        score = 0.0 if strict is None else 0.1  # the form alone
    steps = (extra_info or {}).get("steps", 0)
    return {"score": score, "acc": float(flexible == ground_truth), "format": float(strict is not None), "steps": steps}
