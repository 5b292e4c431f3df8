"""A stream that saves its position."""


class Resumable:
    """An iterator over a sequence, with a state of its own."""

    def __init__(self, sequence):
        self.sequence, self.at = sequence, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.sequence):
            raise StopIteration
        self.at += 1
        return self.sequence[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
