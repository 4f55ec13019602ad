"""Programs that check the project itself; no wheel has them."""
