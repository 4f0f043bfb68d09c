"""All checks of the course in one list."""

from catalog import check_catalog
from check_docs import check_head, check_links, check_map, check_sections
from check_exercises import check_exercises
from check_modules import check_machine_paths, check_module_names, check_sources
from check_names import check_names
from check_quiz import check_answers, check_order, check_quiz
from check_quotes import check_quotes, check_texts
from check_records import check_records
from check_shape import check_folders, check_public_names, check_search_paths, check_shape, check_top_level
from codeindex import CodeIndex
from exercises.sections import check_section
from faults import Fault
from lessons import Course, Lesson
from mutants.check import check_mutants

COURSE_CHECKS = (
    check_top_level,
    check_folders,
    check_search_paths,
    check_module_names,
    check_sources,
    check_machine_paths,
    check_links,
    check_map,
    check_answers,
    check_records,
    check_catalog,
)


def check_lesson(course: Course, lesson: Lesson, index: CodeIndex) -> list[Fault]:
    """Everything that one lesson folder can be wrong in."""
    return [
        *check_shape(lesson),
        *check_public_names(lesson, index),
        *check_head(course, lesson),
        *check_sections(lesson),
        *check_names(lesson, index),
        *check_quotes(course, lesson, index),
        *check_quiz(lesson),
        *check_order(lesson),
        *check_exercises(lesson, index),
        *check_section(lesson),
        *check_mutants(lesson),
    ]


def check_course(course: Course, subcommands: dict[str, set[str]]) -> list[Fault]:
    """All faults of the course, sorted by file and line. `subcommands` are the options of each `course` command."""
    index = CodeIndex(course)
    faults = [fault for check in COURSE_CHECKS for fault in check(course)]
    faults += check_texts(course, index, subcommands)
    for lesson in course.lessons:
        faults += check_lesson(course, lesson, index)
    if not course.lessons:
        faults.append(Fault("phases", 1, "there is no lesson"))
    return sorted(set(faults))
