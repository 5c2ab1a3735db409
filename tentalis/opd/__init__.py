"""On-policy distillation: hints from feedback, and what a teacher who read the hint says of the student's tokens."""

from tentalis.opd.hints import RULE_HINTER, rule_hint
from tentalis.opd.prompt import HINT_TAG, NoUserMessage, hinted
from tentalis.opd.teacher import Taught, Teacher, TeacherRefused, aligned

__all__ = [
    "HINT_TAG",
    "RULE_HINTER",
    "NoUserMessage",
    "Taught",
    "Teacher",
    "TeacherRefused",
    "aligned",
    "hinted",
    "rule_hint",
]
