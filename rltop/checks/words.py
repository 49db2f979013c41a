"""Short words that carry grammar, in languages written in Latin letters.

Running text of any of these languages holds 15 to 50 % of them; lists, names and noise hold almost none. The list need
not be complete: a dozen of the most frequent words of a language is enough to recognise its text.
"""

from __future__ import annotations

_BY_LANGUAGE = (
    # English
    "a an the of and or to in on at by for from with as is are was were be been it its this that these those "
    "there here we you he she they i me my your his her our their us them not no yes if then than so but because "
    "while when where which who what how all any each every some can could will would should may might must do "
    "does did done has have had let so into over under about after before between out up down more most less only "
    "also just very now get got use one two",
    # German, Dutch, Afrikaans
    "der die das den dem des ein eine einen einem einer und oder aber nicht ist sind war wir ihr sie er es ich du "
    "mit von zu zum zur im am auf für aus bei nach wie was wenn dann dass daß auch nur noch schon hat haben wird "
    "werden kann durch um de het een en van te dat niet zijn met voor op aan er maar om ook als bij dan nog wordt "
    "naar uit ze die hy sy nie vir wat",
    # Scandinavian languages, Icelandic, Faroese
    "och att det som en ett är av för på med den till inte har om ett var jag de vi kan så men från och at er af "
    "til ikke på jeg vi han hun var men og að er sem í á við um ekki það en hann hún við hafa verið tað ikki",
    # French, Spanish, Portuguese, Italian, Catalan, Galician, Romanian, Occitan
    "le la les un une des du de et est en que qui dans pour pas sur au aux ce cette il elle nous vous je on se sa "
    "son ses par plus ne ou où mais avec sont été être tout el los las una unos del al y o es por con para se lo "
    "su como más pero sus no si ya son esta este muy também os as um uma do da dos das em no na por com não é que "
    "se ao mais foi il lo gli i uno di e è che in del della dei delle per con non sono come ma anche più nel alla "
    "si els amb és per dels ce și nu cu din la pe o un este care sau mai fost în dar cum au avem va fi ei",
    # Polish, Czech, Slovak, Slovene, Croatian, Bosnian, Serbian in Latin letters, Sorbian
    "i z na do się nie to że jest jak o za od po ale co dla przez są był być czy tak już oraz a v se je že ve "
    "si by pro tak jako ale ma nebo byl jsou sa aj ako pri alebo bol in da ne pa bi ki so tudi ali ter kot za u "
    "su od do koji kao ili što ga je bio će smo",
    # Lithuanian, Latvian, Finnish, Estonian, Hungarian
    "ir yra kad su iš į ne tai bet kaip jis buvo un ir ar ka no par uz bet kas tas nav ja on ei että se hän oli "
    "mutta kun niin kuin ovat myös tai jos mitä sen ole voi kuten ta ei see oli et kui ka aga mis oma a az és "
    "hogy nem is egy van volt ez meg csak de ha mint már vagy még",
    # Turkish, Azerbaijani, Uzbek, Turkmen, Kurdish
    "ve bir bu da de için ile çok ne gibi daha o olarak olan sonra kadar ama ki mi en var değil və bu bir üçün "
    "ilə olan va uchun bilan bu ham emas we üçin bilen û ku di ji bo li ev ye",
    # Vietnamese, Indonesian, Malay, Javanese, Tagalog, Cebuano, Malagasy, Maori, Hawaiian, Samoan
    "là và của có một các cho không được trong với người này đã những để khi từ ra vào như thì về cũng nếu ta "
    "yang dan di ini itu dengan untuk dari pada adalah tidak akan ke oleh atau juga dalam karena bisa sudah ada "
    "saya ing lan sing ora ang ng mga sa na ay at ko mo si ito hindi para ug nga dili ny sy izay fa te ngā he ki "
    "o me nō ka ke nā i lā e le o ai",
    # Swahili, Hausa, Yoruba, Igbo, Zulu, Xhosa, Somali, Shona, Rwanda
    "ya wa kwa ni na za la katika hii kuwa cha vya lakini au si hiyo da ba ta ne ce wani don shi ti ni awọn ní pé "
    "fún kan na nke bụ ndị ma ka ngo uma kodwa futhi oo iyo waa ku ka in ah kuti mu ndi mu ku ko cyangwa",
    # Basque, Welsh, Irish, Scottish Gaelic, Breton, Albanian, Maltese, Latin, Esperanto, Interlingua, Haitian Creole
    "eta da ez bat du dira zen hau baina edo yn y yr i o ar mae ei nid wedi gan am agus na an ar sé tá is ní le "
    "do bha air ha ar en e të dhe në për me që nuk është një i li ta u il ma hija et in est non ad cum ut qui sed "
    "ex la kaj de estas en ne mi vi al por kun sur pli ki nan yo pou ak se pa",
)

FUNCTION_WORDS: frozenset[str] = frozenset(word for block in _BY_LANGUAGE for word in block.split())
"""Lower-case words."""
ENGLISH_WORDS: frozenset[str] = frozenset(_BY_LANGUAGE[0].split())
"""Those of English."""

_STARTERS = (
    "A After All Alright An And Answer As At Based By Certainly Consider Define Each Find First For From Given "
    "Good Great Hello Here Hi Hmm How However I If In It Let Lets My No Note Now Of Okay On Once One Our Since So "
    "Solution Step Sure Thank Thanks That The Their Then There These They This Thus To Using Wait We Well What "
    "When While With Yes You Your"
)
SENTENCE_STARTERS: frozenset[str] = frozenset(_STARTERS.split())
"""Capitalised words that open an English answer: a stray token glued to one, or put before one, does not belong."""
