"""From a graph's outputs to answers, without a word about Triton: labels, entities, spans of text, masked tokens.

Each does what transformers' pipeline of the same task does, on a whole request at once. What is not there, such as the
second entity of a text that has one, is an empty text, a score of 0 and a place of -1.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from boxes import suppress_neighbours
from scores import ABSENT, FUNCTIONS, Array, Place, softmax

Tensors = Mapping[str, Array]


class AnswerError(ValueError):
    """A row that has no answer; the message is for the caller who sent it.

    Args:
        row: Its place in the request.
        fault: What is wrong with it.
        name: Name of the input.
    """

    def __init__(self, row: int, fault: str, name: str = "TEXT") -> None:
        super().__init__(f"{name} row {row} {fault}")
        self.row = row
        self.fault = fault


def build_postprocess(settings: Mapping[str, Any]) -> Callable[[Tensors], dict[str, Array]]:
    """Return the function that `postprocess.json` describes: a request's tensors in, its answers out.

    Raises:
        ValueError: It describes none that there is.
    """
    find_answer = KINDS.get(settings["answers"])
    if find_answer is None:
        raise ValueError(f"postprocess.json asks for {settings['answers']}: expected one of {', '.join(KINDS)}")
    answer = find_answer()
    return lambda tensors: answer(tensors, settings)


def rank_labels(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return LABEL and SCORE, both [rows, k], best first."""
    scores = FUNCTIONS[settings["function"]](tensors["logits"])
    # Stable, so that equal scores keep the order of their labels.
    order = np.argsort(-scores, axis=1, kind="stable")[:, : settings["top_k"]]
    labels = np.array(settings["labels"], dtype=np.object_)[order]
    return {"LABEL": labels, "SCORE": np.take_along_axis(scores, order, axis=1).astype(np.float32)}


def find_entities(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return LABEL, SCORE, START and END, all [rows, the most entities of a row], in the order of the text."""
    rows = []
    for logits, spans, continues in zip(
        tensors["logits"], tensors["token_spans"], tensors["continues_word"], strict=True
    ):
        is_token = spans[:, 0] >= 0
        scores = softmax(logits[is_token])
        rows.append(aggregate(scores, spans[is_token], continues[is_token], settings))
    return stack_places(rows, max([1, *map(len, rows)]), "LABEL")


def aggregate(scores: Array, spans: Array, continues: Array, settings: Mapping[str, Any]) -> list[Place]:
    """Return the entities of one text.

    Args:
        scores: Probabilities, [tokens, labels].
        spans: Characters of each token, [tokens, 2].
        continues: 1 for a token that belongs to the word before it, [tokens].
        settings: `labels`, `ignored` labels, and `aggregation`: `none` answers with tokens, `simple` joins tokens of
            one entity, `first`, `average` and `max` decide for whole words first, and join those.
    """
    aggregation = settings["aggregation"]
    groups = [[index] for index in range(len(scores))]
    if aggregation in ("first", "average", "max"):
        groups = join_words(continues)
    labelled: list[Place] = []
    for group in groups:
        chosen = choose_scores(scores[group], aggregation)
        best = int(chosen.argmax())
        labelled.append(
            (settings["labels"][best], float(chosen[best]), int(spans[group[0], 0]), int(spans[group[-1], 1]))
        )
    if aggregation != "none":
        labelled = join_entities(labelled)
    return [place for place in labelled if place[0] not in settings["ignored"]]


def join_words(continues: Array) -> list[list[int]]:
    """Return the tokens of each word."""
    words: list[list[int]] = []
    for index, flag in enumerate(continues):
        if flag and words:
            words[-1].append(index)
        else:
            words.append([index])
    return words


def choose_scores(scores: Array, aggregation: str) -> Array:
    """Return the scores that stand for a word, [labels], of those of its tokens, [tokens, labels]."""
    if aggregation == "average":
        return np.asarray(scores.mean(axis=0))
    if aggregation == "max":
        return np.asarray(scores[scores.max(axis=1).argmax()])
    return np.asarray(scores[0])


def join_entities(places: Sequence[Place]) -> list[Place]:
    """Return neighbours of one kind as one, unless a `B-` says that another begins; scores are averaged."""
    groups: list[list[Place]] = []
    for place in places:
        begins, kind = split_tag(place[0])
        if groups and not begins and split_tag(groups[-1][-1][0])[1] == kind:
            groups[-1].append(place)
        else:
            groups.append([place])
    return [
        # transformers names a group by what follows the first hyphen, whatever stands before it.
        (group[0][0].split("-", 1)[-1], float(np.mean([place[1] for place in group])), group[0][2], group[-1][3])
        for group in groups
    ]


def split_tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and of which kind; one without `B-` or `I-` continues."""
    if label.startswith(("B-", "I-")):
        return label.startswith("B-"), label[2:]
    return False, label


def find_spans(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return ANSWER, SCORE, START and END, all [rows, k], best first."""
    contexts = [value.decode("utf-8") for value in tensors["TEXT_PAIR"].reshape(-1)]
    rows = [
        rank_spans(logits, spans, context, settings)
        for logits, spans, context in zip(tensors["span_logits"], tensors["answer_spans"], contexts, strict=True)
    ]
    return stack_places(rows, settings["top_k"], "ANSWER")


def rank_spans(logits: Array, spans: Array, context: str, settings: Mapping[str, Any]) -> list[Place]:
    """Return the best answers in one context, at most k.

    Spans that become the same words count as one answer, wherever they stand and in whichever window.

    Args:
        logits: Scores of being the first and the last token, [windows, seq_len, 2].
        spans: Characters of the word around each token of the context, -1 elsewhere, [windows, seq_len, 2].
        context: The text itself.
        settings: `top_k`, `max_answer_tokens`, `has_cls_token`.
    """
    found: dict[str, Place] = {}
    # More than are wanted, because some of them coincide.
    wanted = settings["top_k"] * 2 + 10
    for window_logits, window_spans in zip(logits, spans, strict=True):
        if not (window_spans[:, 0] >= 0).any():
            continue
        for first, last, score in score_spans(window_logits, window_spans, wanted, settings):
            start, end = int(window_spans[first, 0]), int(window_spans[last, 1])
            answer = context[start:end]
            _, before, *place = found.get(answer.lower(), (answer, 0.0, start, end))
            found[answer.lower()] = (context[place[0] : place[1]], before + score, place[0], place[1])
    return sorted(found.values(), key=lambda place: -place[1])[: settings["top_k"]]


def score_spans(logits: Array, spans: Array, wanted: int, settings: Mapping[str, Any]) -> list[tuple[int, int, float]]:
    """Return the likeliest spans of one window: first token, last token, probability; best first."""
    is_context = spans[:, 0] >= 0
    # The first token stands for `no answer`: it takes its share of the probability, and is not an answer.
    takes_part = is_context.copy()
    takes_part[0] |= settings["has_cls_token"]
    ends = softmax(np.where(takes_part[:, None], logits, -10000.0).T).T  # [seq_len, 2]
    ends[0] = 0.0
    candidates = np.tril(np.triu(np.outer(ends[:, 0], ends[:, 1])), settings["max_answer_tokens"] - 1)
    flat = candidates.reshape(-1)
    best = np.argsort(-flat, kind="stable")[:wanted]
    firsts, lasts = np.unravel_index(best, candidates.shape)
    return [
        (int(first), int(last), float(candidates[first, last]))
        for first, last in zip(firsts, lasts, strict=True)
        if is_context[first] and is_context[last]
    ]


def fill_masks(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return TOKEN and SCORE, both [rows, the most masks of a row, k], best first.

    Raises:
        AnswerError: A text has no mask.
    """
    top_k = settings["top_k"]
    scores, ids = tensors["top_log_probabilities"][:, :, :top_k], tensors["top_token_ids"][:, :, :top_k]
    is_mask = ids[:, :, 0] >= 0  # [rows, seq_len]
    for row, count in enumerate(is_mask.sum(axis=1)):
        if not count:
            raise AnswerError(
                row,
                f"has no mask: expected {settings['mask']} in it, within the length that the model reads, got none; "
                f"write it where a token is missing",
            )
    masks = int(is_mask.sum(axis=1).max())
    tokens = np.full((len(ids), masks, top_k), "", dtype=np.object_)
    probabilities = np.zeros((len(ids), masks, top_k), dtype=np.float32)
    names = settings["tokens"]
    for row, places in enumerate(is_mask):
        count = int(places.sum())
        tokens[row, :count] = [[names[token_id] for token_id in best] for best in ids[row, places]]
        probabilities[row, :count] = np.exp(scores[row, places])
    return {"TOKEN": tokens, "SCORE": probabilities}


def find_keypoints(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return LABEL and SCORE, [rows, keypoints], and KEYPOINT, [rows, keypoints, 2]: x and y in the picture.

    The top of the parabola through the largest value of a heatmap and its two neighbours, along each axis. Places are
    counted from the upper left corner in widths of a pixel.
    """
    heatmaps = tensors["heatmaps"].astype(np.float64)
    geometry = tensors["geometry"].astype(np.float64)
    rows, count, _, width = heatmaps.shape
    best = heatmaps.reshape(rows, count, -1).argmax(axis=2)
    y, x = np.divmod(best, width)
    row, point = np.ogrid[:rows, :count]
    down = refine(heatmaps[row, point, :, x], y)
    right = refine(heatmaps[row, point, y], x)
    down_stride, right_stride = settings["stride"]
    places = np.stack([(x + 0.5 + right) * right_stride, (y + 0.5 + down) * down_stride], axis=2)
    scale, offset = geometry[:, None, 0:2], geometry[:, None, 2:4]
    labels = np.array(settings["labels"], dtype=np.object_)
    return {
        "LABEL": np.broadcast_to(labels, (rows, count)).copy(),
        "SCORE": heatmaps[row, point, y, x].astype(np.float32),
        "KEYPOINT": (places * scale + offset).astype(np.float32),
    }


def rank_boxes(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return LABEL and SCORE, [rows, k], BOX, [rows, k, 4], best first, and COUNT, [rows, 1]: how many there are.

    A box is left, top, right and bottom in the picture. What does not score above the threshold is absent.
    """
    # The last label is `no object`; boxes that share an object are what the network was trained not to make.
    probabilities = softmax(tensors["logits"])[..., :-1]
    top_k = settings["top_k"]
    order = np.argsort(-probabilities.max(axis=2), axis=1, kind="stable")[:, :top_k]
    rows = np.arange(len(order))[:, None]
    ids, scores = probabilities.argmax(axis=2)[rows, order], probabilities.max(axis=2)[rows, order]
    middles, sizes = np.split(tensors["pred_boxes"][rows, order], 2, axis=2)
    corners = np.concatenate([middles - sizes / 2, middles + sizes / 2], axis=2)
    # Parts of the picture, whatever lies beside it in the pixels.
    boxes = corners * np.tile(tensors["geometry"][:, None, 4:6], 2)
    is_found = scores > settings["threshold"]
    return {
        "LABEL": np.where(is_found, np.array(settings["labels"], dtype=np.object_)[ids], ABSENT[0]),
        "SCORE": np.where(is_found, scores, 0).astype(np.float32),
        "BOX": np.where(is_found[..., None], boxes, -1).astype(np.float32),
        "COUNT": is_found.sum(axis=1, keepdims=True).astype(np.int64),
    }


def refine(lines: Array, places: Array) -> Array:
    """Return how far the top of a parabola lies from the middle one of three values, at most half a step.

    Args:
        lines: Values along one axis, [rows, keypoints, size].
        places: Where the largest lies, [rows, keypoints]; at an end it stays there.
    """
    size = lines.shape[2]
    inside = np.clip(places, 1, max(size - 2, 1))[..., None] + np.array([-1, 0, 1])
    left, middle, right = np.moveaxis(np.take_along_axis(lines, np.minimum(inside, size - 1), axis=2), 2, 0)
    curve = 2 * middle - left - right
    shift = np.clip(np.divide(0.5 * (right - left), curve, out=np.zeros_like(curve), where=curve > 0), -0.5, 0.5)
    return np.where((places > 0) & (places < size - 1), shift, 0.0)


def stack_places(rows: Sequence[Sequence[Place]], width: int, label_name: str) -> dict[str, Array]:
    """Return the answers of all rows as tensors [rows, width], filled up where a row has fewer."""
    filled = [[*row, *[ABSENT] * (width - len(row))] for row in rows]
    columns = [[[place[part] for place in row] for row in filled] for part in range(4)]
    dtypes: tuple[Any, ...] = (np.object_, np.float32, np.int64, np.int64)
    names = (label_name, "SCORE", "START", "END")
    return {name: np.array(column, dtype=dtype) for name, column, dtype in zip(names, columns, dtypes, strict=True)}


# What a request's tensors and the settings are in, and the answers out.
Kind = Callable[[Tensors, Mapping[str, Any]], dict[str, Array]]


def _import_maps() -> Kind:
    # Of all answers these alone need Pillow, which takes its time and memory.
    from maps import draw_maps

    return draw_maps


# What `answers` in `postprocess.json` names → what returns its function.
KINDS: Mapping[str, Callable[[], Kind]] = {
    "labels": lambda: rank_labels,
    "entities": lambda: find_entities,
    "spans": lambda: find_spans,
    "masks": lambda: fill_masks,
    "keypoints": lambda: find_keypoints,
    "boxes": lambda: rank_boxes,
    "suppressed_boxes": lambda: suppress_neighbours,
    "map": _import_maps,
}
