"""What all sections of a config share."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """A table of settings."""

    # Strict: "64" is no number here and 1 is not true, for a typing error is likelier than such a wish.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def given(self) -> dict[str, Any]:
        """The settings that were made, so that defaults stay where they are defined."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}
