"""On-policy distillation: hints from feedback, and a teacher's log-probs of the student's tokens under the hint.

In: a result and feedback on it. Out: hints, and the teacher's log-probs per token.
Begin with hinters.py (feedback to hints), then teacher.py (hints to log-probs).
"""

from tentalis.opd.hinters import Hinter, HintProposal, NoHinter, RuleHinter
from tentalis.opd.hints import RULE_HINTER, rule_hint
from tentalis.opd.models import FixedModel, SamplerModel, TeacherModel, TeacherRefused
from tentalis.opd.prompt import HINT_TAG, NoPrompt, NoUserMessage, TeacherPrompt, student_prompt, with_hint
from tentalis.opd.teacher import Teacher, TeacherScores, align_scores

__all__ = [
    "HINT_TAG",
    "RULE_HINTER",
    "FixedModel",
    "HintProposal",
    "Hinter",
    "NoHinter",
    "NoPrompt",
    "NoUserMessage",
    "RuleHinter",
    "SamplerModel",
    "Teacher",
    "TeacherModel",
    "TeacherPrompt",
    "TeacherRefused",
    "TeacherScores",
    "align_scores",
    "rule_hint",
    "student_prompt",
    "with_hint",
]
