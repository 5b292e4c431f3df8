"""Checks of pictures."""

from itertools import combinations


def assert_no_overlap(figure):
    """No text of a figure covers another one or leaves the figure."""
    figure.draw_without_rendering()
    texts = [*figure.texts]
    for axes in figure.axes:
        titles = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        labels = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        within = axes.get_window_extent().padded(2)
        shown = (label for label in labels if within.contains(*label.get_transform().transform(label.get_position())))
        legend = axes.get_legend()
        texts += [*titles, *axes.texts, *shown, *(legend.get_texts() if legend else ())]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text() and text.get_visible()]
    for text, box in boxes:
        assert figure.bbox.padded(1).count_contains(box.corners()) == 4, f"{text!r} leaves the figure"
    for (text, box), (other, its) in combinations(boxes, 2):
        assert not box.padded(-1).overlaps(its.padded(-1)), f"{text!r} covers {other!r}"
