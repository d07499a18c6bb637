"""Files of any length: each row asked once, answered in order, and taken up again where it was broken off."""
