"""Values of the label ``domain``, so that clients, who name domains, cannot make metrics grow without end."""

OTHER = "other"


class DomainLabels:
    """The first so many domains get labels of their own and keep them; all others share ``other``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: dict[str, str] = {}

    def of(self, domain: str) -> str:
        """The domain's label.  Safe between threads, but for two new ones that both get the last place."""
        found = self._own.get(domain)
        if found is not None:
            return found
        return OTHER if len(self._own) >= self._most else self._own.setdefault(domain, domain)
