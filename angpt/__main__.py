from angpt.cli import main

main()
