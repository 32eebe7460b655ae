"""Programs that weigh the project, and programs that make files which ship. They are not shipped
themselves."""
