"""Programs that make files which ship. They are not shipped themselves."""
