"""Small programs for people who build Switchyard: the test browser, recorded data, pictures for the README."""
