"""The one error type that reaches a person: what, where, why, and what to do next."""

from __future__ import annotations


class RltopError(Exception):
    """Bad input or an environment that cannot work. The command line prints it and exits with `exit_code`.

    what: one clause naming the thing that is wrong ("batch sizes do not divide").
    where: the flag, `file:line`, address or path it was found at.
    why: the reason, with the numbers.
    do: the next thing to try, ready to paste where possible.
    exit_code: 2 when the input is at fault (default), 1 when the run failed.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", do: str = "", exit_code: int = 2) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.do = do
        self.exit_code = exit_code

    def __str__(self) -> str:
        head = _one_line(f"{self.where}: {self.what}" if self.where else self.what)
        parts = [head]
        if self.why:
            parts.append(f"  why: {self.why}")
        if self.do:
            parts.append(f"  do:  {self.do}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive pickling by default, and Ray pickles them.
        return (_rebuild, (self.what, self.where, self.why, self.do, self.exit_code))


def _one_line(text: str) -> str:
    """A path may hold a line end, or bytes that are no text: they are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _rebuild(what: str, where: str, why: str, do: str, exit_code: int) -> RltopError:
    return RltopError(what, where=where, why=why, do=do, exit_code=exit_code)
