"""On-policy distillation: hints from feedback, and what a teacher who read the hint says of the student's tokens."""

from tentalis.opd.hinters import Hinter, NoHinter, Proposal, RuleHinter
from tentalis.opd.hints import RULE_HINTER, rule_hint
from tentalis.opd.models import OneModel, SamplersModel, TeacherModel, TeacherRefused
from tentalis.opd.prompt import HINT_TAG, NoPrompt, NoUserMessage, Prompt, hinted, students
from tentalis.opd.teacher import Taught, Teacher, aligned

__all__ = [
    "HINT_TAG",
    "RULE_HINTER",
    "Hinter",
    "NoHinter",
    "NoPrompt",
    "NoUserMessage",
    "OneModel",
    "Prompt",
    "Proposal",
    "RuleHinter",
    "SamplersModel",
    "Taught",
    "Teacher",
    "TeacherModel",
    "TeacherRefused",
    "aligned",
    "hinted",
    "rule_hint",
    "students",
]
