"""Starting the services as processes. No logic of the loop lives here."""
