"""The long-running process at a site or a hub: all input and output lives here. Private; nothing else imports it."""
