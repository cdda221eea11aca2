# The scheduler knows tokens through prefix and block granularities only. Words of the declaration layer and of paged
# attention consumers must not appear in this tree. Run as: cmake -DROOT=<scheduler_cpp> -P vocabulary.cmake
# The words are assembled here so that this file does not contain them.
string(CONCAT w1 "page" "_size")
string(CONCAT w2 "rows" "_per_page")
string(CONCAT w3 "stri" "de")
string(CONCAT w4 "checkpoint" "_granularity")
string(CONCAT w5 "pag" "ed")

file(GLOB_RECURSE files ${ROOT}/*.h ${ROOT}/*.cpp ${ROOT}/CMakeLists.txt ${ROOT}/BUILD)
foreach(file IN LISTS files)
  file(READ ${file} text)
  foreach(word IN ITEMS ${w1} ${w2} ${w3} ${w4} ${w5})
    if(text MATCHES "(^|[^a-zA-Z])${word}([^a-zA-Z_]|s[^a-zA-Z]|$)")
      message(SEND_ERROR "${file}: contains '${word}'")
    endif()
  endforeach()
endforeach()
