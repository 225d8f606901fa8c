"""What well-known articles and papers claim about mixed precision, measured claim by claim."""
