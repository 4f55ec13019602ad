"""Programs for the developers of tfmp; they are not part of the wheel."""
