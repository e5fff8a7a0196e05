.PHONY: reference

reference: setup  ## published figures of the field beside ours, with verdicts
	@$(BIN)/pdserve reference
